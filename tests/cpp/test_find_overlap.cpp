// SPDX-License-Identifier: Apache-2.0
#include "csrc/planner/find_overlap.h"

#include <algorithm>
#include <set>

#include "tests/cpp/expect.h"
#include "tests/cpp/random_box.h"

namespace bytecheckpoint::planner {
namespace {

using tensor::Box;
using tensor::Dims;

/// Checks every element of every box, one by one.
bool overlap_somewhere(const std::vector<Box>& boxes) {
  std::set<Dims> seen;
  bool twice = false;
  for (const Box& box : boxes) {
    test::for_each_index(box.sizes, [&](Dims index) {
      for (size_t d = 0; d < index.size(); ++d) index[d] += box.offsets[d];
      twice = !seen.insert(index).second || twice;
    });
  }
  return twice;
}

void check_overlap(const std::vector<Box>& boxes, size_t num_dims) {
  std::vector<std::vector<int64_t>> flat;
  std::vector<const int64_t*> pointers;
  for (const Box& box : boxes) {
    flat.emplace_back(box.offsets.begin(), box.offsets.end());
    flat.back().insert(flat.back().end(), box.sizes.begin(), box.sizes.end());
  }
  for (const auto& numbers : flat) pointers.push_back(numbers.data());
  const auto [a, b] = find_overlap(pointers, num_dims);
  REQUIRE((a != b) == overlap_somewhere(boxes));
  if (a == b) return;
  Box common;
  REQUIRE(tensor::intersect(boxes[a], boxes[b], &common));
}

/// Cuts the tensor into boxes at random places, each cut through a whole box.
void cut(test::Random* random, const Box& box, int depth, std::vector<Box>* out) {
  const size_t d =
      box.sizes.empty() ? 0 : static_cast<size_t>(test::draw(random, 0, static_cast<int64_t>(box.sizes.size()) - 1));
  if (depth == 0 || box.sizes.empty() || box.sizes[d] < 2) {
    out->push_back(box);
    return;
  }
  const int64_t at = test::draw(random, 1, box.sizes[d] - 1);
  Box low = box;
  Box high = box;
  low.sizes[d] = at;
  high.offsets[d] += at;
  high.sizes[d] -= at;
  cut(random, low, depth - 1, out);
  cut(random, high, depth - 1, out);
}

TEST_CASE("find_overlap: overlaps are found where there are any, and only there") {
  test::Random random(30);
  for (int round = 0; round < 6000; ++round) {
    const Dims sizes = test::draw_sizes(&random, 4, 7);
    std::vector<Box> boxes;
    if (test::draw(&random, 0, 1) == 0) {
      cut(&random, tensor::whole(sizes), static_cast<int>(test::draw(&random, 0, 5)), &boxes);
    }
    for (int64_t more = test::draw(&random, 0, 2) == 0 ? test::draw(&random, 1, 4) : 0; more > 0; --more) {
      boxes.push_back(test::draw_box(&random, sizes));
    }
    std::shuffle(boxes.begin(), boxes.end(), random);
    check_overlap(boxes, sizes.size());
  }
}

TEST_CASE("find_overlap: boxes round a hole, which no cut divides") {
  const std::vector<Box> around = {{{0, 0}, {1, 2}}, {{0, 2}, {2, 1}}, {{2, 1}, {1, 2}}, {{1, 0}, {2, 1}}};
  check_overlap(around, 2);
  std::vector<Box> filled = around;
  filled.push_back({{1, 1}, {1, 1}});
  check_overlap(filled, 2);
  filled.push_back({{1, 1}, {1, 2}});
  check_overlap(filled, 2);
  // The same with a third dim, in which the boxes also differ.
  for (int64_t depth : {1, 2}) {
    std::vector<Box> deep;
    for (size_t i = 0; i < around.size(); ++i) {
      const auto z = static_cast<int64_t>(i % 2);
      deep.push_back(
          {{around[i].offsets[0], around[i].offsets[1], z}, {around[i].sizes[0], around[i].sizes[1], depth}});
    }
    deep.push_back({{0, 0, 1}, {1, 1, depth}});
    check_overlap(deep, 3);
  }
}

}  // namespace
}  // namespace bytecheckpoint::planner
