// SPDX-License-Identifier: Apache-2.0
#include "csrc/planner/inventory.h"

#include <limits>

#include "csrc/planner/inventory_blob.h"
#include "csrc/planner/merge_inventories.h"
#include "tests/cpp/expect.h"
#include "tests/cpp/mutate.h"
#include "tests/cpp/random_world.h"

namespace bytecheckpoint::planner {
namespace {

using tensor::Box;
using tensor::DType;

TEST_CASE("inventory: a rank's entries come back from their bytes as they were given") {
  test::Random random(5);
  for (int round = 0; round < 400; ++round) {
    const auto num_ranks = static_cast<uint32_t>(test::draw(&random, 1, 16));
    const auto rank = static_cast<uint32_t>(test::draw(&random, 0, num_ranks - 1));
    const std::vector<test::HeldEntry> held = test::draw_world(&random, num_ranks)[rank];
    const std::string blob = test::blob_of(rank, held);
    const Inventory inventory = test::value_of(decode_inventory(blob));
    REQUIRE(encode_inventory(inventory) == blob);
    REQUIRE(test::blob_of(rank, held) == blob);
    REQUIRE(inventory.ranks == RankSets::single(rank));
    REQUIRE(inventory.entries.size() == held.size());
    for (size_t i = 0; i < held.size(); ++i) {
      const Entry& entry = inventory.entries[i];
      REQUIRE(inventory.fqn(entry) == held[i].fqn);
      REQUIRE(inventory.path(entry) == held[i].path);
      REQUIRE(entry.kind == held[i].kind);
      REQUIRE(entry.first_rank == rank);
      REQUIRE(entry.ordinal == i);
      REQUIRE(inventory.box_holders(entry, 0) == RankSets::single(rank));
      REQUIRE(entry.num_boxes == 1);
      if (!entry.is_tensor()) continue;
      REQUIRE(inventory.info(entry).dtype == held[i].info.dtype);
      REQUIRE(inventory.info(entry).sizes == held[i].info.sizes);
      REQUIRE(entry.can_split == held[i].can_split);
      REQUIRE(inventory.box(entry, 0) ==
              (held[i].boxes.empty() ? tensor::whole(held[i].info.sizes) : held[i].boxes[0]));
    }
  }
}

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

TEST_CASE("inventory: what cannot be is refused, and leaves no trace") {
  const tensor::TensorInfo info = test::info_of({4, 4});
  constexpr int64_t kMost = std::numeric_limits<int64_t>::max();
  InventoryBuilder builder(0);
  EXPECT_OK(builder.add("a", EntryKind::kTensor, "", info, true, {}));
  EXPECT_FAILURE(kInvalidArgument, "'a': given twice", builder.add("a", EntryKind::kBytes, "", {}, true, {}));
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
  EXPECT_OK(builder.add("b", EntryKind::kShard, "", info, true, {{{3, 3}, {kMost, kMost}}}));  // asked later
  const Inventory inventory = test::value_of(builder.finish());
  CHECK(inventory.entries.size() == 2);
  CHECK(encode_inventory(test::value_of(decode_inventory(encode_inventory(inventory)))) == encode_inventory(inventory));
  EXPECT_CODE(kInvalidArgument, InventoryBuilder(kMaxRanks).finish());
}

/// Everything that later code relies on without looking again.
void check_decoded(const Inventory& inventory, size_t blob_bytes) {
  REQUIRE(inventory.text.size() <= 600 * blob_bytes);
  REQUIRE(inventory.dims.size() <= 256 * blob_bytes);
  size_t boxes = 0;
  for (const Entry& entry : inventory.entries) {
    REQUIRE(entry.boxes_begin == boxes);
    boxes += entry.num_boxes;
    (void)inventory.fqn(entry);
    (void)inventory.path(entry);
    if (!entry.is_tensor()) continue;
    REQUIRE(is_possible(entry.dtype, inventory.sizes(entry), entry.num_dims));
    for (size_t b = 0; b < entry.num_boxes; ++b) {
      const Box box = inventory.box(entry, b);
      for (size_t d = 0; d < entry.num_dims; ++d) REQUIRE(std::min(box.offsets[d], box.sizes[d]) >= 0);
      REQUIRE(inventory.rank_sets.highest(inventory.box_holders(entry, b)) < kMaxRanks);
    }
  }
  REQUIRE(boxes == inventory.num_boxes());
}

TEST_CASE("inventory: damaged bytes are refused or read as something valid") {
  test::Random random(6);
  std::vector<std::string> blobs;
  for (int i = 0; i < 40; ++i) {
    const test::World world = test::draw_world(&random, static_cast<uint32_t>(test::draw(&random, 1, 9)));
    const std::vector<std::string> of_ranks = test::blobs_of(world);
    blobs.push_back(of_ranks[0]);
    blobs.push_back(encode_inventory(test::merged(of_ranks)));
  }
  test::Mutator mutate(7, blobs, std::string("\0\x01\x02\x7F\x80\xFF", 6));
  int num_read = 0;
  for (int round = 0; round < 40000; ++round) {
    const std::string damaged = mutate(blobs[mutate.below(blobs.size())]);
    const auto decoded = decode_inventory(damaged);
    if (!decoded.is_ok()) {
      REQUIRE(decoded.status().code() == base::Code::kCorrupt);
      continue;
    }
    ++num_read;
    check_decoded(decoded.value(), damaged.size());
    const std::string again = encode_inventory(decoded.value());
    REQUIRE(encode_inventory(test::value_of(decode_inventory(again))) == again);
  }
  CHECK(num_read > 100);
}

TEST_CASE("inventory: every cut is damage") {
  test::Random random(8);
  const std::string blob = encode_inventory(test::merged(test::blobs_of(test::draw_world(&random, 6))));
  for (size_t size = 0; size < blob.size(); ++size) EXPECT_CODE(kCorrupt, decode_inventory(blob.substr(0, size)));
  EXPECT_FAILURE(kCorrupt, "damaged at byte", decode_inventory(blob + '\0'));
}

}  // namespace
}  // namespace bytecheckpoint::planner
