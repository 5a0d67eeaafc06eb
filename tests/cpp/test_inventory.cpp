// SPDX-License-Identifier: Apache-2.0
#include "csrc/planner/inventory.h"

#include <limits>

#include "csrc/planner/inventory_blob.h"
#include "csrc/planner/merge_inventories.h"
#include "tests/cpp/expect.h"
#include "tests/cpp/random_world.h"

namespace bytecheckpoint::planner {
namespace {

using tensor::Box;
using tensor::DType;

TEST_CASE("inventory: properties, several boxes, long and empty names") {
  tensor::TensorInfo info = test::info_of({8, 6}, DType::kFloat32);
  info.requires_grad = info.pin_memory = true;
  info.memory_format = 2;
  const std::string long_name(1000, 'n');
  InventoryBuilder builder(7);
  EXPECT_OK(builder.add(long_name + "a", EntryKind::kShard, long_name, info, false,
                        {{{4, 3}, {4, 3}}, {{0, 0}, {4, 6}}, {{4, 0}, {4, 3}}}));
  EXPECT_OK(builder.add(long_name + "b", EntryKind::kTensor, "", info, true, {}));
  EXPECT_OK(builder.add("", EntryKind::kBytes, std::string("\0\xFF", 2), {}, false, {}));
  EXPECT_OK(builder.add("scalar", EntryKind::kTensor, "", test::info_of({}), true, {}));
  const std::string blob = encode_inventory(test::value_of(builder.finish()));
  const Inventory inventory = test::value_of(decode_inventory(blob));
  CHECK(encode_inventory(inventory) == blob);
  REQUIRE(inventory.entries.size() == 4);
  CHECK(inventory.fqn(inventory.entries[0]) == long_name + "a");
  CHECK(inventory.path(inventory.entries[0]) == long_name);
  CHECK(inventory.fqn(inventory.entries[1]) == long_name + "b");
  CHECK(inventory.path(inventory.entries[1]).empty());
  CHECK(inventory.fqn(inventory.entries[2]).empty());
  CHECK(inventory.path(inventory.entries[2]) == std::string("\0\xFF", 2));
  const tensor::TensorInfo back = inventory.info(inventory.entries[0]);
  CHECK(back.requires_grad);
  CHECK(back.pin_memory);
  CHECK(back.memory_format == 2);
  CHECK_FALSE(inventory.entries[0].can_split);
  CHECK(inventory.entries[1].can_split);
  const Entry& shards = inventory.entries[0];
  REQUIRE(shards.num_boxes == 3);
  CHECK(inventory.box(shards, 0) == Box{{0, 0}, {4, 6}});
  CHECK(inventory.box(shards, 1) == Box{{4, 0}, {4, 3}});
  CHECK(inventory.box(shards, 2) == Box{{4, 3}, {4, 3}});
  CHECK(inventory.box_bytes(shards, 0) == 96);
  CHECK(inventory.box_bytes(inventory.entries[1], 0) == 192);
  CHECK(inventory.box_bytes(inventory.entries[2], 0) == 0);
  CHECK(inventory.box_bytes(inventory.entries[3], 0) == 2);
  CHECK(inventory.by_name() == std::vector<uint32_t>{2, 0, 1, 3});
}

TEST_CASE("inventory: boxes that are given in any order are found again") {
  const std::vector<Box> boxes = {{{4, 3}, {4, 3}}, {{0, 0}, {4, 6}}, {{4, 0}, {4, 3}}};
  InventoryBuilder builder(0);
  std::vector<size_t> order;
  EXPECT_OK(builder.add("a", EntryKind::kShard, "", test::info_of({8, 6}), false, boxes, &order));
  CHECK(order == std::vector<size_t>{1, 2, 0});
  const Inventory inventory = test::value_of(builder.finish());
  for (size_t i = 0; i < order.size(); ++i) CHECK(inventory.box(inventory.entries[0], i) == boxes[order[i]]);
}

TEST_CASE("inventory: what cannot be is refused, and leaves no trace") {
  const tensor::TensorInfo info = test::info_of({4, 4});
  constexpr int64_t kMost = std::numeric_limits<int64_t>::max();
  InventoryBuilder builder(0);
  EXPECT_OK(builder.add("a", EntryKind::kTensor, "", info, true, {}));
  EXPECT_FAILURE(kInvalidArgument, "'a': the key is given twice",
                 builder.add("a", EntryKind::kBytes, "", {}, true, {}));
  EXPECT_FAILURE(kInvalidArgument, "no box", builder.add("b", EntryKind::kShard, "", info, true, {}));
  EXPECT_FAILURE(
      kInvalidArgument, "'b': rank 0 holds the box at [0, 0] of [2, 4] twice",
      builder.add("b", EntryKind::kShard, "", info, true, {{{0, 0}, {2, 4}}, {{2, 0}, {2, 4}}, {{0, 0}, {2, 4}}}));
  EXPECT_FAILURE(kInvalidArgument, "negative",
                 builder.add("b", EntryKind::kShard, "", info, true, {{{0, -1}, {2, 4}}}));
  EXPECT_FAILURE(kInvalidArgument, "dims", builder.add("b", EntryKind::kShard, "", info, true, {{{0}, {2}}}));
  EXPECT_CODE(kInvalidArgument, builder.add("b", EntryKind::kTensor, "", test::info_of({-1}), true, {}));
  EXPECT_CODE(kInvalidArgument, builder.add("b", EntryKind::kTensor, "", test::info_of({kMost}), true, {}));
  EXPECT_CODE(kInvalidArgument, builder.add("b", EntryKind::kTensor, "", test::info_of({2}, DType::kNone), true, {}));
  EXPECT_CODE(kInvalidArgument,
              builder.add("b", EntryKind::kTensor, "", test::info_of(tensor::Dims(256, 1)), true, {}));
  // the box's end is checked later
  EXPECT_OK(builder.add("b", EntryKind::kShard, "", info, true, {{{3, 3}, {kMost, kMost}}}));
  const Inventory inventory = test::value_of(builder.finish());
  CHECK(inventory.entries.size() == 2);
  CHECK(encode_inventory(test::value_of(decode_inventory(encode_inventory(inventory)))) == encode_inventory(inventory));
  EXPECT_CODE(kInvalidArgument, InventoryBuilder(kMaxRanks).finish());
}

}  // namespace
}  // namespace bytecheckpoint::planner
