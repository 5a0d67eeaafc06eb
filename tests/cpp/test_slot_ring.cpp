// SPDX-License-Identifier: Apache-2.0
#include "csrc/staging/slot_ring.h"

#include <sys/mman.h>

#include <cstring>
#include <set>
#include <thread>
#include <vector>

#include "tests/cpp/expect.h"

namespace bytecheckpoint::staging {
namespace {

TEST_CASE("slot_ring: slots are apart, aligned and writable to the last byte") {
  const auto ring = test::value_of(SlotRing::map(3));
  CHECK(ring->num_slots() == 3);
  for (int slot = 0; slot < 3; ++slot) {
    CHECK(reinterpret_cast<uintptr_t>(ring->slot(slot)) % (2 << 20) == 0);
    CHECK(ring->slot(slot) == ring->slot(0) + slot * kSlotBytes);
    ring->slot(slot)[0] = 1;
    ring->slot(slot)[kSlotBytes - 1] = 2;
  }
  CHECK(ring->slot(0)[kSlotBytes - 1] == 2);
  CHECK(ring->slot(1)[0] == 1);
}

TEST_CASE("slot_ring: a ring has whole slots, two at least, and a limit") {
  CHECK(test::value_of(BorrowedRing::borrow(0))->num_slots() == 2);
  CHECK(test::value_of(BorrowedRing::borrow(1))->num_slots() == 2);
  CHECK(test::value_of(BorrowedRing::borrow(3 * kSlotBytes))->num_slots() == 3);
  CHECK(test::value_of(BorrowedRing::borrow(3 * kSlotBytes + 1))->num_slots() == 4);
  CHECK(test::value_of(BorrowedRing::borrow(int64_t{1} << 50))->num_slots() == kMaxRingBytes / kSlotBytes);
}

TEST_CASE("slot_ring: a ring that was given back is borrowed again, warm") {
  uint8_t* memory = nullptr;
  {
    const BorrowedRing ring = test::value_of(BorrowedRing::borrow(2 * kSlotBytes));
    memory = ring->slot(0);
  }
  const BorrowedRing again = test::value_of(BorrowedRing::borrow(2 * kSlotBytes));
  CHECK(again->slot(0) == memory);
}

/// Number of pages among these `bytes` bytes that are in memory.
size_t resident_pages(const uint8_t* from, int64_t bytes) {
  std::vector<unsigned char> resident(static_cast<size_t>(bytes / 4096));
  REQUIRE(::mincore(const_cast<uint8_t*>(from), static_cast<size_t>(bytes), resident.data()) == 0);
  size_t count = 0;
  for (const unsigned char page : resident) count += page & 1;
  return count;
}

TEST_CASE("slot_ring: populating touches the pages that are asked for, and leaves what is in them") {
  const auto ring = test::value_of(SlotRing::map(4));
  ring->slot(0)[5] = 7;
  ring->populate(2);
  ring->slot(1)[6] = 8;  // while populate runs
  while (resident_pages(ring->slot(0), 2 * kSlotBytes) < 2 * kSlotBytes / 4096) std::this_thread::yield();
  CHECK(resident_pages(ring->slot(2), 2 * kSlotBytes) == 0);
  CHECK(ring->slot(0)[5] == 7);
  CHECK(ring->slot(1)[6] == 8);
  ring->populate(1);
  ring->populate(100);
  while (resident_pages(ring->slot(0), 4 * kSlotBytes) < 4 * kSlotBytes / 4096) std::this_thread::yield();
}

TEST_CASE("slot_ring: a ring may be destroyed while it is populated") {
  for (int round = 0; round < 20; ++round) test::value_of(SlotRing::map(4))->populate(4);
}

TEST_CASE("slot_ring: what was prepared is what is borrowed") {
  EXPECT_OK(BorrowedRing::prepare(5 * kSlotBytes, 1));
  const BorrowedRing ring = test::value_of(BorrowedRing::borrow(5 * kSlotBytes));
  while (resident_pages(ring->slot(0), 2 * kSlotBytes) < 2 * kSlotBytes / 4096) std::this_thread::yield();
  CHECK(resident_pages(ring->slot(3), kSlotBytes) == 0);
}

TEST_CASE("slot_ring: borrowers at the same time have rings of their own") {
  constexpr int kThreads = 4;
  std::vector<int> wrong(kThreads, 0);
  std::vector<std::thread> threads;
  for (int t = 0; t < kThreads; ++t) {
    threads.emplace_back([&wrong, t] {
      for (int round = 0; round < 50; ++round) {
        auto ring = BorrowedRing::borrow(2 * kSlotBytes);
        if (!ring.is_ok()) {
          ++wrong[t];
          continue;
        }
        uint8_t* slot = ring.value()->slot(1);
        std::memset(slot, t, 64);
        for (int i = 0; i < 64; ++i) wrong[t] += slot[i] == t ? 0 : 1;
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  CHECK(wrong == std::vector<int>(kThreads, 0));
}

}  // namespace
}  // namespace bytecheckpoint::staging
