// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <memory>

#include "csrc/base/status.h"
#include "csrc/staging/pages.h"

namespace bytecheckpoint::staging {

inline constexpr int64_t kSlotBytes = 8 << 20;
/// Enough slots to write one while another is filled. More take a cache's worth of memory from everybody else: beside
/// 64 MiB a training loop lost twice as much as beside 24, for a save that took longer.
inline constexpr int64_t kDefaultRingBytes = 3 * kSlotBytes;
/// Most that a ring may take: the memory that a save or a load adds to the process.
inline constexpr int64_t kMaxRingBytes = 256 << 20;

/// Host memory of `num_slots` slots of kSlotBytes.
class SlotRing {
 public:
  static base::Result<std::unique_ptr<SlotRing>> map(int num_slots);

  /// Begins to touch the pages of the first `num_slots` slots, and returns. The slots may be used meanwhile. One thread
  /// at a time calls this.
  void populate(int num_slots) { pages_->populate(num_slots * kSlotBytes); }

  uint8_t* slot(int index) const { return pages_->first() + index * kSlotBytes; }
  int num_slots() const { return static_cast<int>(pages_->bytes() / kSlotBytes); }

 private:
  explicit SlotRing(std::unique_ptr<Pages> pages) : pages_(std::move(pages)) {}
  std::unique_ptr<Pages> pages_;
};

/// A ring borrowed from the process: touching fresh memory costs more than copying through warm memory, so one ring
/// stays mapped between saves. A second borrower at the same time gets a ring of its own.
class BorrowedRing {
 public:
  /// \param ring_bytes  Rounded up to whole slots; at least two slots, at most kMaxRingBytes.
  static base::Result<BorrowedRing> borrow(int64_t ring_bytes);
  BorrowedRing(BorrowedRing&&) = default;
  BorrowedRing& operator=(BorrowedRing&&) = default;
  ~BorrowedRing();

  /// Has a ring of `ring_bytes` touched for a transfer of `expected_bytes` that will soon borrow it. Returns at once.
  static base::Status prepare(int64_t ring_bytes, int64_t expected_bytes);

  SlotRing& operator*() const { return *ring_; }
  SlotRing* operator->() const { return ring_.get(); }

 private:
  explicit BorrowedRing(std::unique_ptr<SlotRing> ring) : ring_(std::move(ring)) {}
  std::unique_ptr<SlotRing> ring_;
};

}  // namespace bytecheckpoint::staging
