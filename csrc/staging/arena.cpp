// SPDX-License-Identifier: Apache-2.0
#include "csrc/staging/arena.h"

#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>

#include "csrc/base/bytes.h"

namespace bytecheckpoint::staging {
namespace {

constexpr int64_t kHugePageBytes = 2 << 20;
constexpr int kPopulateWrite = 23;  // MADV_POPULATE_WRITE, which older headers do not have

// The one ring that waits for its next borrower. Lock-free, so that a fork in another thread cannot leave a lock held
// in the child; the child simply finds the ring there or not, and its pages are its own copies.
std::atomic<SlotRing*> idle_ring{nullptr};

int slots_for(int64_t bytes) {
  const int64_t wanted = bytes / kSlotBytes + (bytes % kSlotBytes != 0 ? 1 : 0);
  return static_cast<int>(std::clamp<int64_t>(wanted, 2, kMaxRingBytes / kSlotBytes));
}

}  // namespace

base::Result<std::unique_ptr<SlotRing>> SlotRing::map(int num_slots) {
  std::unique_ptr<SlotRing> ring(new SlotRing());
  ring->num_slots_ = num_slots;
  const int64_t bytes = num_slots * kSlotBytes;
  ring->mapping_bytes_ = static_cast<size_t>(bytes + kHugePageBytes);
  void* mapping =
      ::mmap(nullptr, ring->mapping_bytes_, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (mapping == MAP_FAILED) {
    return base::Status::storage("mmap", "ring of slots", base::text(ring->mapping_bytes_, " bytes"), errno);
  }
  ring->mapping_ = mapping;
  const auto address = reinterpret_cast<int64_t>(mapping);
  ring->first_ = reinterpret_cast<uint8_t*>(base::align_up(address, kHugePageBytes));
  // Advice: without huge pages everything works, at about half the speed.
  (void)::madvise(ring->first_, static_cast<size_t>(bytes), MADV_HUGEPAGE);
  return ring;
}

SlotRing::SlotRing() : owner_(::getpid()) {}

void SlotRing::populate(int num_slots) {
  const int first = populated_;
  const int end = std::min(num_slots, num_slots_);
  if (end <= first || ::getpid() != owner_) return;
  stop_populating();
  stop_ = false;
  populated_ = end;
  populating_ = std::thread([this, first, end] {
    for (int i = first; i < end && !stop_; ++i) {
      // Advice: where the kernel does not know it, pages are touched when they are used.
      (void)::madvise(slot(i), static_cast<size_t>(kSlotBytes), kPopulateWrite);
    }
  });
}

void SlotRing::stop_populating() {
  if (!populating_.joinable()) return;
  if (::getpid() != owner_) {
    // A forked child has no such thread, and another may have its handle: it can be neither joined nor detached.
    new std::thread(std::move(populating_));
    return;
  }
  stop_ = true;
  populating_.join();
}

SlotRing::~SlotRing() {
  stop_populating();
  if (mapping_ != nullptr) ::munmap(mapping_, mapping_bytes_);
}

base::Status BorrowedRing::prepare(int64_t ring_bytes, int64_t expected_bytes) {
  BCP_ASSIGN_OR_RETURN(const BorrowedRing ring, borrow(ring_bytes));
  ring->populate(slots_for(expected_bytes));
  return base::Status::ok();
}

base::Result<BorrowedRing> BorrowedRing::borrow(int64_t ring_bytes) {
  const int num_slots = slots_for(ring_bytes);
  std::unique_ptr<SlotRing> ring(idle_ring.exchange(nullptr));
  if (ring == nullptr || ring->num_slots() != num_slots) {
    BCP_ASSIGN_OR_RETURN(ring, SlotRing::map(num_slots));
  }
  return BorrowedRing(std::move(ring));
}

BorrowedRing::~BorrowedRing() {
  if (ring_ != nullptr) std::unique_ptr<SlotRing>(idle_ring.exchange(ring_.release()));
}

}  // namespace bytecheckpoint::staging
