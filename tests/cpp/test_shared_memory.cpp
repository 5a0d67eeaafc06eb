// SPDX-License-Identifier: Apache-2.0
#include "csrc/engine/load/shared_memory.h"

#include <thread>
#include <utility>

#include "tests/cpp/expect.h"

namespace bytecheckpoint::engine {
namespace {

using staging::kSlotBytes;

TEST_CASE("shared_memory: a ring is lent again only when nobody writes to it any more") {
  const auto memory = test::value_of(SharedMemory::map(2 * kSlotBytes));
  auto first = memory->lend();
  uint8_t* const slot = first->slot(0);
  std::thread writer([lent = std::move(first)]() mutable {
    for (int64_t i = 0; i < kSlotBytes; ++i) lent->slot(0)[i] = 1;
    lent.reset();
  });
  const auto second = memory->lend();
  CHECK(second->slot(0) == slot);
  for (int64_t i = 0; i < kSlotBytes; ++i)
    second->slot(0)[i] = 2;  // TSan, and the line below, see a writer that is left
  CHECK(second->slot(0)[kSlotBytes - 1] == 2);
  writer.join();
}

TEST_CASE("shared_memory: the ring outlives the memory that lent it") {
  auto memory = test::value_of(SharedMemory::map(2 * kSlotBytes));
  const auto lent = memory->lend();
  memory.reset();
  lent->slot(1)[kSlotBytes - 1] = 3;
  CHECK(lent->slot(1)[kSlotBytes - 1] == 3);
}

TEST_CASE("shared_memory: a peer is there once it is open, and only then") {
  const auto memory = test::value_of(SharedMemory::map(2 * kSlotBytes));
  const auto peer = test::value_of(SharedMemory::map(3 * kSlotBytes));
  staging::RingAddress address = test::value_of(peer->address());
  EXPECT_OK(memory->open(5, address));
  REQUIRE(memory->of_peer(5) != nullptr);
  CHECK(memory->of_peer(5)->num_slots() == 3);
  CHECK(memory->of_peer(4) == nullptr);
  ++address.inode;
  EXPECT_FAILURE(kNotFound, "/proc/", memory->open(4, address));
  CHECK(memory->of_peer(4) == nullptr);
}

}  // namespace
}  // namespace bytecheckpoint::engine
