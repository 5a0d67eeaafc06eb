// SPDX-License-Identifier: Apache-2.0
#include "csrc/tensor/box.h"

#include <doctest/doctest.h>

#include <limits>
#include <random>

namespace bytecheckpoint::tensor {
namespace {

constexpr int64_t kMax = std::numeric_limits<int64_t>::max();

TEST_CASE("box: number of elements, or no number") {
  int64_t numel = -1;
  REQUIRE(checked_numel({}, &numel));
  CHECK(numel == 1);
  REQUIRE(checked_numel({2, 3, 4}, &numel));
  CHECK(numel == 24);
  REQUIRE(checked_numel({2, 0, 4}, &numel));
  CHECK(numel == 0);
  CHECK_FALSE(checked_numel({-1}, &numel));
  CHECK_FALSE(checked_numel({0, -1}, &numel));
  CHECK_FALSE(checked_numel({kMax, 2}, &numel));
}

TEST_CASE("box: inside or not") {
  CHECK(is_inside({{}, {}}, {}));
  CHECK(is_inside(whole({2, 3}), {2, 3}));
  CHECK(is_inside({{2, 0}, {0, 3}}, {2, 3}));
  CHECK_FALSE(is_inside({{1, 0}, {2, 3}}, {2, 3}));
  CHECK_FALSE(is_inside({{3, 0}, {0, 3}}, {2, 3}));
  CHECK_FALSE(is_inside({{-1, 0}, {1, 3}}, {2, 3}));
  CHECK_FALSE(is_inside({{1, 0}, {-1, 3}}, {2, 3}));
  CHECK_FALSE(is_inside({{kMax}, {kMax}}, {2}));
  CHECK_FALSE(is_inside({{0}, {1}}, {2, 3}));
  CHECK_FALSE(is_inside({{0, 0}, {1}}, {2, 3}));
}

TEST_CASE("box: the common part is what both contain") {
  std::mt19937_64 random(4);
  for (int round = 0; round < 3000; ++round) {
    const size_t num_dims = random() % 4;
    const auto draw = [&] {
      Box box{Dims(num_dims), Dims(num_dims)};
      for (size_t d = 0; d < num_dims; ++d) {
        box.offsets[d] = static_cast<int64_t>(random() % 5);
        box.sizes[d] = static_cast<int64_t>(random() % 4);
      }
      return box;
    };
    const Box a = draw(), b = draw();
    Box common;
    const bool overlap = intersect(a, b, &common);
    bool expected = true;
    for (size_t d = 0; d < num_dims; ++d) {
      int64_t first = -1, count = 0;
      for (int64_t i = 0; i < 10; ++i) {
        const bool in_both =
            i >= a.offsets[d] && i < a.offsets[d] + a.sizes[d] && i >= b.offsets[d] && i < b.offsets[d] + b.sizes[d];
        if (in_both && first < 0) first = i;
        count += in_both;
      }
      expected = expected && count > 0;
      if (overlap) {
        REQUIRE(common.offsets[d] == first);
        REQUIRE(common.sizes[d] == count);
      }
    }
    REQUIRE(overlap == expected);
  }
}

TEST_CASE("box: boxes of unlike ranks have nothing in common") {
  Box common;
  CHECK_FALSE(intersect({{0}, {1}}, {{}, {}}, &common));
}

TEST_CASE("box: strides are those of torch, where a size of 0 counts as 1") {
  CHECK(row_major_strides({}) == Dims{});
  CHECK(row_major_strides({5}) == Dims{1});
  CHECK(row_major_strides({2, 3, 4}) == Dims{12, 4, 1});
  CHECK(row_major_strides({2, 0, 4}) == Dims{4, 4, 1});
}

TEST_CASE("box: text for messages") {
  CHECK(to_text({}) == "[]");
  CHECK(to_text({7}) == "[7]");
  CHECK(to_text({2, -3}) == "[2, -3]");
}

TEST_CASE("box: strides of a shape without elements may wrap around, but not trap") {
  CHECK(row_major_strides({0, int64_t{1} << 62, 4}).size() == 3);
}

}  // namespace
}  // namespace bytecheckpoint::tensor
