// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <future>
#include <map>
#include <memory>

#include "csrc/base/status.h"
#include "csrc/staging/peer_ring.h"
#include "csrc/staging/slot_ring.h"

namespace bytecheckpoint::engine {

/// The memory through which one rank of a shared load gives units to other ranks of its machine, and they to it. A rank
/// reads into its own ring; the others copy what they want straight from there.
///
///     this rank's ring   lent to one `SharedRun` after the other
///     rings of peers     mapped once, read only
///
/// Not thread-safe, except that a ring that is lent may be given back in any thread.
class SharedMemory {
 public:
  /// Maps the ring. Its pages are not touched before they are used. \returns kStorage.
  static base::Result<std::unique_ptr<SharedMemory>> map(int64_t ring_bytes);

  base::Result<staging::RingAddress> address() const { return staging::address_of(*ring_); }
  /// Maps the ring of a rank. \returns the errors of `PeerRing::open`.
  base::Status open(uint32_t rank, const staging::RingAddress& address);

  /// Returns the ring of a rank; null if it is not open.
  const staging::PeerRing* of_peer(uint32_t rank) const;
  /// Lends this rank's ring, until the last copy of the result is destroyed. Waits until the ring that was lent before
  /// is back: a thread that is still reading for an earlier run must not write into what a later run gives to peers.
  std::shared_ptr<staging::SlotRing> lend();

 private:
  explicit SharedMemory(std::unique_ptr<staging::SlotRing> ring) : ring_(std::move(ring)) {}

  const std::shared_ptr<staging::SlotRing> ring_;
  std::map<uint32_t, std::unique_ptr<staging::PeerRing>> peers_;
  std::future<void> is_back_;  // invalid until the ring is lent for the first time
};

}  // namespace bytecheckpoint::engine
