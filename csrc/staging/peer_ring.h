// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <memory>

#include "csrc/base/status.h"
#include "csrc/staging/pages.h"
#include "csrc/staging/slot_ring.h"

namespace bytecheckpoint::staging {

/// Where other processes of a machine find the memory of a ring. Means something only in the pid namespace of `pid`.
struct RingAddress {
  int64_t pid = 0;
  int64_t fd = -1;
  // Of the memory's own inode: the pid may belong to another process by now, and the descriptor to another file.
  int64_t device = 0;
  int64_t inode = 0;
  int64_t num_slots = 0;
};

/// Returns the address of a ring of `SlotRing::map_shareable`. \returns kStorage. kInvalidArgument for another ring.
base::Result<RingAddress> address_of(const SlotRing& ring);

/// The ring of another process of this machine, to read from. It stays mapped when that process has ended.
///
///     owner   | slot 0 | slot 1 | slot 2 |    read and write; says which slot is filled, and waits for the answer
///     peer    | slot 0 | slot 1 | slot 2 |    read only; the same memory
///
/// Which slot may be read, and for how long, the two processes must agree on by messages. Thread-safe.
class PeerRing {
 public:
  /// \returns kStorage if this process may not open the memory. kNotFound if something else is at the address.
  static base::Result<std::unique_ptr<PeerRing>> open(const RingAddress& address);

  const uint8_t* slot(int index) const { return pages_->first() + index * kSlotBytes; }
  int num_slots() const { return static_cast<int>(pages_->bytes() / kSlotBytes); }

 private:
  explicit PeerRing(std::unique_ptr<Pages> pages) : pages_(std::move(pages)) {}
  const std::unique_ptr<Pages> pages_;
};

}  // namespace bytecheckpoint::staging
