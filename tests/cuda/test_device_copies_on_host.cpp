// SPDX-License-Identifier: Apache-2.0
#include <doctest/doctest.h>

#include <algorithm>
#include <cstring>
#include <deque>
#include <vector>

#include "csrc/staging/device_copies.h"
#include "tests/cpp/device_memory.h"
#include "tests/cpp/expect.h"
#include "tests/cuda/cuda_on_host.h"

namespace bytecheckpoint::staging {
namespace {

namespace cuda = test::cuda_on_host;
using test::Random;
using test::SampleTensor;

/// Copies over one device of a new round.
struct Round {
  explicit Round(uint64_t seed) : random(seed) {
    cuda::begin_round(seed, int64_t{1} << 40);
    CHECK(!copies.knows(0));
    CHECK(copies.any_device() == kHost);
    REQUIRE(test::value_of(copies.use(0, caller.emplace_back().handle())));
    CHECK(copies.any_device() == 0);
  }
  ~Round() { SharedDeviceMerge::drop_all(); }

  Random random;
  std::deque<cuda::CallerStream> caller;
  DeviceCopies copies;
};

TEST_CASE("device_copies on host: what lies before the first tensor that was added stays as it is") {
  for (uint64_t seed = 1; seed <= 20; ++seed) {
    Round round(seed);
    // As in a ring, in which the second slot is first in the file, and has bytes already.
    const SampleTensor first(&round.random, {500}, 4, false), second(&round.random, {10, 25}, 8, false);
    std::vector<uint8_t> slots(10000, 0x5A);
    uint8_t* const second_slot = slots.data() + 5000;
    EXPECT_OK(round.copies.add(0, first.view(), 0, 2000, second_slot + 1000));
    EXPECT_OK(round.copies.add(0, second.view(), 0, 2000, second_slot - 2000));
    EXPECT_OK(round.copies.gather());
    CHECK(std::all_of(slots.data(), second_slot - 2000, [](uint8_t byte) { return byte == 0x5A; }));
    CHECK(std::memcmp(second_slot - 2000, second.packed().data(), 2000) == 0);
    CHECK(std::all_of(second_slot, second_slot + 1000, [](uint8_t byte) { return byte == 0x5A; }));
    CHECK(std::memcmp(second_slot + 1000, first.packed().data(), 2000) == 0);
    CHECK(std::all_of(second_slot + 3000, slots.data() + slots.size(), [](uint8_t byte) { return byte == 0x5A; }));
    CHECK(cuda::num_enqueued() == 0);
  }
}

TEST_CASE("device_copies on host: a part of a tensor is those of its elements, and several tensors may want the same") {
  for (uint64_t seed = 1; seed <= 20; ++seed) {
    Round round(seed);
    const std::vector<uint8_t> host = test::random_bytes(&round.random, 6000);
    auto* const from = const_cast<uint8_t*>(host.data());
    const SampleTensor whole(&round.random, {3, 5, 50}, 8, false), same(&round.random, {750}, 8, false);
    const std::vector<uint8_t> before = whole.packed();
    EXPECT_OK(round.copies.add(0, whole.view(), 16, 5992, from + 16));
    EXPECT_OK(round.copies.add(0, same.view(), 0, 6000, from));
    EXPECT_OK(round.copies.scatter());
    const std::vector<uint8_t> after = whole.packed();
    CHECK(std::equal(after.begin(), after.begin() + 16, before.begin()));
    CHECK(std::equal(after.begin() + 16, after.end() - 8, host.begin() + 16));
    CHECK(std::equal(after.end() - 8, after.end(), before.end() - 8));
    CHECK(same.packed() == host);
    CHECK(!round.copies.add(0, same.view(), 0, 6008, from).is_ok());  // it has 6000 bytes
  }
}

TEST_CASE("device_copies on host: what was added and forgotten is not copied") {
  Round round(1);
  const SampleTensor tensor(&round.random, {100}, 4, false);
  std::vector<uint8_t> host(400, 0x5A);
  EXPECT_OK(round.copies.add(0, tensor.view(), 0, 400, host.data()));
  round.copies.clear();
  EXPECT_OK(round.copies.gather());
  EXPECT_OK(round.copies.scatter());
  CHECK(std::all_of(host.begin(), host.end(), [](uint8_t byte) { return byte == 0x5A; }));
  CHECK(cuda::counts().copies == 0);
}

}  // namespace
}  // namespace bytecheckpoint::staging
