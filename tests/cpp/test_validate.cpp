// SPDX-License-Identifier: Apache-2.0
#include "csrc/planner/validate.h"

#include "tests/cpp/expect.h"
#include "tests/cpp/random_world.h"

namespace bytecheckpoint::planner {
namespace {

using tensor::Box;

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
  EXPECT_FAILURE(kInvalidArgument, "'layers.0': rows 2 to 3 of 4 are in no chunk", validate({{top}, {top}}));
  // As many elements as the tensor has, but not all of them.
  EXPECT_FAILURE(kInvalidArgument, "overlap", validate({{top}, {{{1, 0}, {2, 6}}}}));
}

TEST_CASE("validate: one rank alone must hold all of a tensor, too") {
  const tensor::TensorInfo info = test::info_of({4});
  EXPECT_OK(validate_inventory(test::merged({test::blob_of(0, shard(info, {{{0}, {1}}, {{1}, {3}}}))})));
  EXPECT_FAILURE(kInvalidArgument, "'layers.0': rows 0 to 0 of 4 are in no chunk: no rank of this save holds them",
                 validate_inventory(test::merged({test::blob_of(0, shard(info, {{{1}, {3}}}))})));
}

TEST_CASE("validate: where gaps are allowed, parts need not cover a tensor, but may not be held twice") {
  const tensor::TensorInfo info = test::info_of({4});
  const auto validate = [&](const std::vector<Box>& boxes) {
    return validate_inventory(test::merged({test::blob_of(0, shard(info, boxes))}), /*allow_gaps=*/true);
  };
  EXPECT_OK(validate({{{1}, {2}}}));
  EXPECT_FAILURE(kInvalidArgument, "overlap", validate({{{0}, {2}}, {{1}, {2}}}));
  EXPECT_FAILURE(kInvalidArgument, "outside", validate({{{3}, {2}}}));
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
