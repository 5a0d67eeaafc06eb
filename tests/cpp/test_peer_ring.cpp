// SPDX-License-Identifier: Apache-2.0
#include "csrc/staging/peer_ring.h"

#include <memory>

#include "tests/cpp/expect.h"

namespace bytecheckpoint::staging {
namespace {

TEST_CASE("peer_ring: what the owner writes is there at once, in every slot, also when the owner is gone") {
  auto ring = test::value_of(SlotRing::map_shareable(3 * kSlotBytes));
  const auto peer = test::value_of(PeerRing::open(test::value_of(address_of(*ring))));
  REQUIRE(peer->num_slots() == 3);
  for (int slot = 0; slot < 3; ++slot) {
    ring->slot(slot)[0] = static_cast<uint8_t>(slot + 1);
    ring->slot(slot)[kSlotBytes - 1] = static_cast<uint8_t>(slot + 4);
    CHECK(peer->slot(slot)[0] == slot + 1);
    CHECK(peer->slot(slot)[kSlotBytes - 1] == slot + 4);
  }
  ring.reset();
  CHECK(peer->slot(2)[kSlotBytes - 1] == 6);
}

TEST_CASE("peer_ring: nothing but the very memory of the address is opened") {
  const auto ring = test::value_of(SlotRing::map_shareable(2 * kSlotBytes));
  const auto other = test::value_of(SlotRing::map_shareable(2 * kSlotBytes));
  const RingAddress address = test::value_of(address_of(*ring));
  RingAddress wrong = address;
  wrong.fd = other->fd();  // a descriptor that was closed, and opened for something else
  EXPECT_FAILURE(kNotFound, "/proc/", PeerRing::open(wrong).status());
  for (const int64_t num_slots : {int64_t{0}, int64_t{-1}, int64_t{1}, int64_t{3}, int64_t{1} << 50}) {
    wrong = address;
    wrong.num_slots = num_slots;
    EXPECT_FAILURE(kNotFound, "slots", PeerRing::open(wrong).status());
  }
  wrong = address;
  wrong.fd = 1 << 30;
  EXPECT_FAILURE(kStorage, "/proc/", PeerRing::open(wrong).status());
}

TEST_CASE("peer_ring: memory of this process alone has no address") {
  const auto ring = test::value_of(SlotRing::map(2));
  EXPECT_FAILURE(kInvalidArgument, "cannot be shared", address_of(*ring).status());
}

}  // namespace
}  // namespace bytecheckpoint::staging
