// SPDX-License-Identifier: Apache-2.0
#include "csrc/tensor/flat_range.h"

#include <doctest/doctest.h>

#include <limits>
#include <random>

#include "tests/cpp/random_box.h"
#include "tests/cpp/rounds.h"

namespace bytecheckpoint::tensor {
namespace {

std::vector<Box> boxes_of(const Dims& sizes, int64_t begin, int64_t end) {
  auto boxes = boxes_of_flat_range(sizes, begin, end);
  REQUIRE(boxes.is_ok());
  return boxes.value();
}

/// Positions in the flat tensor of the elements of `boxes`, one box after the other.
std::vector<int64_t> positions_of(const std::vector<Box>& boxes, const Dims& sizes) {
  const Dims strides = row_major_strides(sizes);
  std::vector<int64_t> positions;
  for (const Box& box : boxes) {
    test::for_each_index(box.sizes, [&](const Dims& index) {
      positions.push_back(test::dot(index, strides) + test::dot(box.offsets, strides));
    });
  }
  return positions;
}

TEST_CASE("flat_range: parts of rows, whole rows, parts of rows") {
  CHECK(boxes_of({4, 5}, 0, 20) == std::vector<Box>{{{0, 0}, {4, 5}}});
  CHECK(boxes_of({4, 5}, 5, 15) == std::vector<Box>{{{1, 0}, {2, 5}}});
  CHECK(boxes_of({4, 5}, 6, 9) == std::vector<Box>{{{1, 1}, {1, 3}}});
  CHECK(boxes_of({4, 5}, 3, 17) == std::vector<Box>{{{0, 3}, {1, 2}}, {{1, 0}, {2, 5}}, {{3, 0}, {1, 2}}});
  CHECK(boxes_of({4, 5}, 3, 7) == std::vector<Box>{{{0, 3}, {1, 2}}, {{1, 0}, {1, 2}}});
  CHECK(boxes_of({7}, 2, 6) == std::vector<Box>{{{2}, {4}}});
}

TEST_CASE("flat_range: of little there is little") {
  CHECK(boxes_of({}, 0, 1) == std::vector<Box>{{{}, {}}});
  CHECK(boxes_of({}, 0, 0).empty());
  CHECK(boxes_of({}, 1, 1).empty());
  CHECK(boxes_of({3, 4}, 12, 12).empty());
  CHECK(boxes_of({3, 0, 4}, 0, 0).empty());
  CHECK(boxes_of({1, 1, 1}, 0, 1) == std::vector<Box>{{{0, 0, 0}, {1, 1, 1}}});
}

TEST_CASE("flat_range: 2 * ndim - 1 boxes are reached") {
  CHECK(boxes_of({3, 3, 3, 3}, 1, 80).size() == 7);
}

TEST_CASE("flat_range: no such elements") {
  constexpr int64_t kMax = std::numeric_limits<int64_t>::max();
  CHECK(boxes_of_flat_range({2, 3}, 0, 7).status().code() == base::Code::kInvalidArgument);
  CHECK(boxes_of_flat_range({2, 3}, -1, 2).status().code() == base::Code::kInvalidArgument);
  CHECK(boxes_of_flat_range({2, 3}, 3, 2).status().code() == base::Code::kInvalidArgument);
  CHECK(boxes_of_flat_range({kMax, 3}, 0, 2).status().code() == base::Code::kInvalidArgument);
  CHECK(boxes_of_flat_range({-2, -3}, 0, 2).status().code() == base::Code::kInvalidArgument);
  CHECK(boxes_of_flat_range({2, 3}, 0, 7).status().message() == "elements [0, 7) are not all in a tensor of [2, 3]");
}

TEST_CASE("flat_range: boxes hold the elements of the range, in their order, and are few") {
  test::Random random(8);
  for (int round = 0; round < test::rounds(20000); ++round) {
    const Dims sizes = test::draw_sizes(&random, 5, 5);
    int64_t numel = 0;
    REQUIRE(checked_numel(sizes, &numel));
    const int64_t begin = test::draw(&random, 0, numel), end = test::draw(&random, begin, numel);
    const std::vector<Box> boxes = boxes_of(sizes, begin, end);
    REQUIRE(boxes.size() <= std::max<size_t>(2 * sizes.size(), 2) - 1);
    const std::vector<int64_t> positions = positions_of(boxes, sizes);
    REQUIRE(static_cast<int64_t>(positions.size()) == end - begin);
    for (size_t i = 0; i < positions.size(); ++i) REQUIRE(positions[i] == begin + static_cast<int64_t>(i));
  }
}

}  // namespace
}  // namespace bytecheckpoint::tensor
