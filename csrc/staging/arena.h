// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <sys/types.h>

#include <atomic>
#include <cstdint>
#include <memory>
#include <thread>

#include "csrc/base/status.h"

namespace bytecheckpoint::staging {

inline constexpr int64_t kSlotBytes = 8 << 20;
/// Most that a ring may take: the memory that a save or a load adds to the process.
inline constexpr int64_t kMaxRingBytes = 256 << 20;

/// Host memory of `num_slots` slots of kSlotBytes, on 2 MiB pages where the system gives them.
///
/// Pages are touched when a slot is first used, so a small save takes little of it, or ahead of that by `populate`.
class SlotRing {
 public:
  static base::Result<std::unique_ptr<SlotRing>> map(int num_slots);
  ~SlotRing();
  SlotRing(const SlotRing&) = delete;
  SlotRing& operator=(const SlotRing&) = delete;

  /// Begins to touch the pages of the first `num_slots` slots, in a thread of its own, and returns. The slots may be
  /// used meanwhile. One thread at a time calls this.
  void populate(int num_slots);

  uint8_t* slot(int index) const { return first_ + index * kSlotBytes; }
  int num_slots() const { return num_slots_; }

 private:
  SlotRing();
  void stop_populating();

  void* mapping_ = nullptr;
  size_t mapping_bytes_ = 0;
  uint8_t* first_ = nullptr;
  int num_slots_ = 0;
  const pid_t owner_;
  std::atomic<int> populated_{0};  // slots whose pages were asked for
  std::atomic<bool> stop_{false};
  std::thread populating_;
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
