// SPDX-License-Identifier: Apache-2.0
#include "csrc/planner/block_cuts.h"

#include <doctest/doctest.h>

#include <random>

#include "csrc/tensor/box.h"
#include "tests/cpp/random_box.h"
#include "tests/cpp/rounds.h"

namespace bytecheckpoint::planner {
namespace {

using Cuts = std::vector<int64_t>;

Cuts cuts_of(const tensor::Dims& sizes, const Cuts& cuts, int64_t min_block_elements = 1) {
  auto moved = block_cuts(sizes, cuts, min_block_elements);
  REQUIRE(moved.is_ok());
  return moved.value();
}

TEST_CASE("block_cuts: to the nearest row") {
  CHECK(cuts_of({4, 5}, {0, 6, 13, 20}) == Cuts{0, 5, 15, 20});
  CHECK(cuts_of({4, 6}, {0, 9, 24}) == Cuts{0, 6, 24});
  CHECK(cuts_of({10}, {0, 3, 10}) == Cuts{0, 3, 10});
  CHECK(cuts_of({}, {0, 1}) == Cuts{0, 1});
  CHECK(cuts_of({0, 3}, {0, 0, 0}) == Cuts{0, 0, 0});
}

TEST_CASE("block_cuts: rows are taken together, and what is small goes whole") {
  CHECK(cuts_of({8, 5}, {0, 12, 40}, 10) == Cuts{0, 10, 40});
  CHECK(cuts_of({8, 5}, {0, 17, 40}, 15) == Cuts{0, 15, 40});
  CHECK(cuts_of({4, 5}, {0, 12, 20}, 1000) == Cuts{0, 20, 20});
  CHECK(cuts_of({4, 5}, {0, 8, 20}, 1000) == Cuts{0, 0, 20});
  CHECK(cuts_of({9}, {0, 2, 4, 9}, 4) == Cuts{0, 0, 4, 9});
}

TEST_CASE("block_cuts: no cuts of that tensor") {
  for (const Cuts& cuts : {Cuts{}, Cuts{0}, Cuts{0, 19}, Cuts{1, 20}, Cuts{0, 9, 8, 20}, Cuts{0, 21, 20}}) {
    CHECK(block_cuts({4, 5}, cuts, 1).status().code() == base::Code::kInvalidArgument);
  }
  CHECK(block_cuts({4, 5}, {0, 20}, 0).status().code() == base::Code::kInvalidArgument);
  CHECK(block_cuts({-4, -5}, {0, 20}, 1).status().code() == base::Code::kInvalidArgument);
}

TEST_CASE("block_cuts: whole rows, in order, by no more than half a group") {
  test::Random random(9);
  for (int round = 0; round < test::rounds(20000); ++round) {
    const tensor::Dims sizes = test::draw_sizes(&random, 4, 9);
    int64_t numel = 0;
    REQUIRE(tensor::checked_numel(sizes, &numel));
    Cuts cuts(static_cast<size_t>(test::draw(&random, 2, 6)));
    for (int64_t& cut : cuts) cut = test::draw(&random, 0, numel);
    cuts.front() = 0;
    cuts.back() = numel;
    std::sort(cuts.begin(), cuts.end());
    const int64_t least = test::draw(&random, 1, 40);
    const Cuts moved = cuts_of(sizes, cuts, least);
    REQUIRE(moved.size() == cuts.size());
    REQUIRE(moved.front() == 0);
    REQUIRE(moved.back() == numel);
    REQUIRE(std::is_sorted(moved.begin(), moved.end()));
    if (numel == 0) continue;
    const int64_t row = sizes.empty() ? 1 : numel / sizes[0];
    const int64_t group = (std::min(least, numel) + row - 1) / row * row;
    for (size_t i = 0; i < cuts.size(); ++i) {
      REQUIRE(moved[i] % row == 0);
      REQUIRE((moved[i] % group == 0 || moved[i] == numel));
      REQUIRE(2 * std::abs(moved[i] - cuts[i]) <= group);
    }
  }
}

}  // namespace
}  // namespace bytecheckpoint::planner
