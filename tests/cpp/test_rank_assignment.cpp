// SPDX-License-Identifier: Apache-2.0
#include "csrc/planner/rank_assignment.h"

#include "tests/cpp/expect.h"
#include "tests/cpp/mutate.h"
#include "tests/cpp/random_world.h"

namespace bytecheckpoint::planner {
namespace {

// test_save_plan.cpp shows that the assignments, when applied, write everything once.

Inventory local_of(uint32_t rank, const test::World& world) {
  return test::value_of(decode_inventory(test::blob_of(rank, world[rank])));
}

TEST_CASE("rank_assignment: in the order of the state dict, from the rank's own inventory") {
  test::World world(2);
  test::add_replicated(&world, "z", test::info_of({1024, 1024}));
  test::add_replicated(&world, "a", test::info_of({4}), false);
  for (auto& held : world) held.push_back({"m", EntryKind::kBytes, "", {}, {}, {}});
  std::reverse(world[1].begin(), world[1].end());
  const Inventory inventory = test::merged(test::blobs_of(world));
  const std::vector<std::string> assignments = encode_assignments(inventory, test::value_of(plan_save(inventory, {})));
  const auto of_0 = test::value_of(apply_assignment(local_of(0, world), assignments[0]));
  REQUIRE(of_0.size() == 3);
  // z, a, m in the state dict; sorted names would be a, m, z
  for (uint32_t i = 0; i < 3; ++i) CHECK(of_0[i].entry == i);
  CHECK_FALSE(of_0[0].is_whole);
  CHECK(of_0[0].box.offsets == tensor::Dims{0, 0});
  CHECK(of_0[1].is_whole);
  CHECK(of_0[1].box == tensor::whole({4}));
  CHECK(of_0[2].is_whole);
  const auto of_1 = test::value_of(apply_assignment(local_of(1, world), assignments[1]));
  REQUIRE(of_1.size() == 1);
  CHECK(of_1[0].entry == 2);
  CHECK(of_1[0].box.offsets[0] == of_0[0].box.sizes[0]);
  CHECK(of_1[0].box.sizes[0] + of_0[0].box.sizes[0] == 1024);
}

TEST_CASE("rank_assignment: grows with what is written, not with what is held") {
  test::World world(100);
  for (int i = 0; i < 300; ++i) test::add_replicated(&world, "w" + std::to_string(i), test::info_of({16}));
  const Inventory inventory = test::merged(test::blobs_of(world));
  for (const std::string& assignment : encode_assignments(inventory, test::value_of(plan_save(inventory, {})))) {
    CHECK(assignment.size() <= 4 + 3 * 3);
  }
}

TEST_CASE("rank_assignment: another rank's, and an inventory of several, are refused") {
  test::World world(2);
  test::add_replicated(&world, "w", test::info_of({4}));
  world[1].push_back({"m", EntryKind::kBytes, "", {}, {}, {}});
  const Inventory inventory = test::merged(test::blobs_of(world));
  const std::vector<std::string> assignments = encode_assignments(inventory, test::value_of(plan_save(inventory, {})));
  EXPECT_FAILURE(kInvalidArgument, "with 2 boxes, but this rank has 1",
                 apply_assignment(local_of(0, world), assignments[1]));
  EXPECT_CODE(kInvalidArgument, apply_assignment(inventory, assignments[0]));
}

TEST_CASE("rank_assignment: damaged bytes are refused, or name boxes that the rank holds") {
  test::Random random(50);
  SaveOptions options;
  options.min_part_bytes = 8;
  for (int round = 0; round < 100; ++round) {
    const test::World world = test::draw_world(&random, static_cast<uint32_t>(test::draw(&random, 1, 8)));
    const Inventory inventory = test::merged(test::blobs_of(world));
    const std::vector<std::string> assignments =
        encode_assignments(inventory, test::value_of(plan_save(inventory, options)));
    const Inventory local = local_of(0, world);
    test::Mutator mutate(static_cast<uint64_t>(round), assignments, std::string("\0\x01\x02\x7F\x80\xFF", 6));
    for (int i = 0; i < 200; ++i) {
      const auto writes = apply_assignment(local, mutate(assignments[0]));
      if (!writes.is_ok()) continue;
      for (const PlannedWrite& write : writes.value()) {
        const Entry& entry = local.entries.at(write.entry);
        const tensor::Box held = local.box(entry, write.number);
        REQUIRE(write.number < entry.num_boxes);
        for (size_t d = 0; d < held.sizes.size(); ++d) {
          REQUIRE(write.box.offsets[d] >= held.offsets[d]);
          REQUIRE(write.box.offsets[d] + write.box.sizes[d] <= held.offsets[d] + held.sizes[d]);
        }
      }
    }
    for (size_t size = 0; size < assignments[0].size(); ++size) {
      EXPECT_CODE(kCorrupt, apply_assignment(local, std::string_view(assignments[0]).substr(0, size)));
    }
  }
}

TEST_CASE("rank_assignment: more writes than the rank has boxes are refused before room is made for them") {
  InventoryBuilder builder(0);
  tensor::TensorInfo info;
  info.dtype = tensor::DType::kUInt8;
  info.sizes = {4};
  EXPECT_OK(builder.add("w", EntryKind::kTensor, "", info, false, {}));
  const Inventory local = test::value_of(builder.finish());
  const std::string one{1, 1, 1, 0, 0};
  EXPECT_OK(apply_assignment(local, one));
  const std::string two{1, 1, 2, 0, 0, 0, 0};
  EXPECT_FAILURE(kCorrupt, "damaged at byte 3 of 7", apply_assignment(local, two));
}

}  // namespace
}  // namespace bytecheckpoint::planner
