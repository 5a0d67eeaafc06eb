// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <memory>

#include "csrc/base/status.h"

namespace bytecheckpoint::staging {

inline constexpr int64_t kSlotBytes = 8 << 20;
/// Most that a ring may take: the memory that a save or a load adds to the process.
inline constexpr int64_t kMaxRingBytes = 256 << 20;

/// Host memory of `num_slots` slots of kSlotBytes, on 2 MiB pages where the system gives them.
///
/// Pages are touched when a slot is first used, so a small save takes little of it.
class SlotRing {
 public:
  static base::Result<std::unique_ptr<SlotRing>> map(int num_slots);
  ~SlotRing();
  SlotRing(const SlotRing&) = delete;
  SlotRing& operator=(const SlotRing&) = delete;

  uint8_t* slot(int index) const { return first_ + index * kSlotBytes; }
  int num_slots() const { return num_slots_; }

 private:
  SlotRing() = default;

  void* mapping_ = nullptr;
  size_t mapping_bytes_ = 0;
  uint8_t* first_ = nullptr;
  int num_slots_ = 0;
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

  SlotRing& operator*() const { return *ring_; }
  SlotRing* operator->() const { return ring_.get(); }

 private:
  explicit BorrowedRing(std::unique_ptr<SlotRing> ring) : ring_(std::move(ring)) {}
  std::unique_ptr<SlotRing> ring_;
};

}  // namespace bytecheckpoint::staging
