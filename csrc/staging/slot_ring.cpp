// SPDX-License-Identifier: Apache-2.0
#include "csrc/staging/slot_ring.h"

#include <algorithm>
#include <atomic>

namespace bytecheckpoint::staging {
namespace {

// The one ring that waits for its next borrower. It is lock-free, so that a fork in another thread cannot leave a lock
// held in the child. The child finds the ring there or not; its pages are copies of its own, or absent.
std::atomic<SlotRing*> idle_ring{nullptr};

int slots_for(int64_t bytes) {
  const int64_t wanted = bytes / kSlotBytes + (bytes % kSlotBytes != 0 ? 1 : 0);
  return static_cast<int>(std::clamp<int64_t>(wanted, 2, kMaxRingBytes / kSlotBytes));
}

}  // namespace

base::Result<std::unique_ptr<SlotRing>> SlotRing::map(int num_slots) {
  BCP_ASSIGN_OR_RETURN(std::unique_ptr<Pages> pages,
                       Pages::map(num_slots * kSlotBytes, "ring of slots", Pages::InFork::kCopied));
  return std::unique_ptr<SlotRing>(new SlotRing(std::move(pages)));
}

base::Result<std::unique_ptr<SlotRing>> SlotRing::map_shareable(int64_t ring_bytes) {
  BCP_ASSIGN_OR_RETURN(std::unique_ptr<Pages> pages,
                       Pages::map_shareable(slots_for(ring_bytes) * kSlotBytes, "ring of slots"));
  return std::unique_ptr<SlotRing>(new SlotRing(std::move(pages)));
}

base::Status BorrowedRing::prepare(int64_t ring_bytes, int64_t expected_bytes) {
  BCP_ASSIGN_OR_RETURN(const BorrowedRing ring, borrow(ring_bytes));
  ring->populate(slots_for(expected_bytes));
  return base::Status::ok();
}

void BorrowedRing::free_idle() {
  std::unique_ptr<SlotRing>(idle_ring.exchange(nullptr)).reset();
}

std::shared_ptr<SlotRing> BorrowedRing::shared(BorrowedRing borrowed) {
  const auto holder = std::make_shared<BorrowedRing>(std::move(borrowed));
  return {holder, holder->ring_.get()};
}

base::Result<BorrowedRing> BorrowedRing::borrow(int64_t ring_bytes) {
  const int num_slots = slots_for(ring_bytes);
  std::unique_ptr<SlotRing> ring(idle_ring.exchange(nullptr));
  if (ring == nullptr || ring->num_slots() != num_slots || !ring->is_here()) {
    BCP_ASSIGN_OR_RETURN(ring, SlotRing::map(num_slots));
  }
  return BorrowedRing(std::move(ring));
}

BorrowedRing::~BorrowedRing() {
  if (ring_ != nullptr) std::unique_ptr<SlotRing>(idle_ring.exchange(ring_.release()));
}

}  // namespace bytecheckpoint::staging
