// SPDX-License-Identifier: Apache-2.0
#include "csrc/planner/validate.h"

#include <set>

#include "tests/cpp/expect.h"
#include "tests/cpp/random_world.h"

namespace bytecheckpoint::planner {
namespace {

using tensor::Box;
using tensor::Dims;

/// Every element of every box, one by one.
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

/// Cuts the tensor into boxes at random places: guillotine cuts, or layers all cut alike.
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

TEST_CASE("validate: overlaps are found where there are any, and only there") {
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

TEST_CASE("validate: boxes round a hole, which no cut divides") {
  const std::vector<Box> around = {{{0, 0}, {1, 2}}, {{0, 2}, {2, 1}}, {{2, 1}, {1, 2}}, {{1, 0}, {2, 1}}};
  check_overlap(around, 2);
  std::vector<Box> filled = around;
  filled.push_back({{1, 1}, {1, 1}});
  check_overlap(filled, 2);
  filled.push_back({{1, 1}, {1, 2}});
  check_overlap(filled, 2);
  // The same with a third dim in which they differ, too.
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

std::vector<test::HeldEntry> shard(const tensor::TensorInfo& info, std::vector<Box> boxes) {
  return {{"layers.0", EntryKind::kShard, "", info, true, std::move(boxes)}};
}

TEST_CASE("validate: bounds, overlaps and gaps are named with key, boxes and ranks") {
  const tensor::TensorInfo info = test::info_of({4, 6});
  const auto validate = [&](const std::vector<std::vector<Box>>& of_ranks) {
    test::World world;
    for (const auto& boxes : of_ranks) world.push_back(shard(info, boxes));
    return validate_inventory(test::merged(test::blobs_of(world)));
  };
  const Box top{{0, 0}, {2, 6}};
  const Box bottom{{2, 0}, {2, 6}};
  EXPECT_OK(validate({{top}, {bottom}}));
  EXPECT_OK(validate({{top}, {bottom}, {bottom}}));
  EXPECT_FAILURE(kInvalidArgument,
                 "'layers.0': shards of a tensor, bfloat16 [4, 6]: the box at [3, 0] of [2, 6] of rank 1",
                 validate({{top}, {{{3, 0}, {2, 6}}}}));
  EXPECT_FAILURE(kInvalidArgument, "outside", validate({{top}, {{{2, 0}, {2, int64_t{1} << 62}}}}));
  EXPECT_FAILURE(kInvalidArgument,
                 "the box at [0, 0] of [2, 6] of rank 0 and the box at [1, 0] of [3, 6] of rank 1 overlap",
                 validate({{top}, {{{1, 0}, {3, 6}}}}));
  EXPECT_FAILURE(kInvalidArgument, "overlap", validate({{top}, {bottom}, {tensor::whole({4, 6})}}));
  EXPECT_FAILURE(kInvalidArgument, "12 elements of 24", validate({{top}, {top}}));
  // As much as the tensor has, but not all of it.
  EXPECT_FAILURE(kInvalidArgument, "overlap", validate({{top}, {{{1, 0}, {2, 6}}}}));
}

TEST_CASE("validate: one rank need not hold all of a tensor, but may not hold parts of it twice") {
  const tensor::TensorInfo info = test::info_of({4});
  EXPECT_OK(validate_inventory(test::merged({test::blob_of(0, shard(info, {{{1}, {2}}}))})));
  EXPECT_FAILURE(kInvalidArgument, "overlap",
                 validate_inventory(test::merged({test::blob_of(0, shard(info, {{{0}, {2}}, {{1}, {2}}}))})));
  EXPECT_FAILURE(kInvalidArgument, "outside",
                 validate_inventory(test::merged({test::blob_of(0, shard(info, {{{3}, {2}}}))})));
}

TEST_CASE("validate: boxes without elements and tensors without dims are no fault") {
  const tensor::TensorInfo info = test::info_of({4});
  EXPECT_OK(validate_inventory(test::merged(
      {test::blob_of(0, shard(info, {{{0}, {4}}})), test::blob_of(1, shard(info, {{{4}, {0}}})),
       test::blob_of(2, shard(info, {{{4}, {0}}})), test::blob_of(3, shard(info, {{{2}, {0}}, {{0}, {0}}}))})));
  EXPECT_FAILURE(kInvalidArgument, "outside",
                 validate_inventory(test::merged({test::blob_of(0, shard(info, {{{5}, {0}}}))})));
  EXPECT_OK(validate_inventory(test::merged({test::blob_of(0, shard(test::info_of({}), {{{}, {}}})),
                                             test::blob_of(1, shard(test::info_of({}), {{{}, {}}}))})));
  const tensor::TensorInfo none = test::info_of({0, 3});
  EXPECT_OK(validate_inventory(test::merged(
      {test::blob_of(0, shard(none, {{{0, 0}, {0, 2}}})), test::blob_of(1, shard(none, {{{0, 2}, {0, 1}}}))})));
}

TEST_CASE("validate: sums of bytes stay countable") {
  test::World world(2);
  for (int i = 0; i < 3; ++i) {
    test::add_replicated(&world, "w" + std::to_string(i), test::info_of({int64_t{1} << 58}));
  }
  EXPECT_FAILURE(kInvalidArgument, "60 bits", validate_inventory(test::merged(test::blobs_of(world))));
}

}  // namespace
}  // namespace bytecheckpoint::planner
