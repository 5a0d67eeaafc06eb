// SPDX-License-Identifier: Apache-2.0
#include "csrc/planner/merge_inventories.h"

#include <algorithm>
#include <map>
#include <set>

#include "csrc/planner/inventory_blob.h"
#include "tests/cpp/expect.h"
#include "tests/cpp/random_world.h"

namespace bytecheckpoint::planner {
namespace {

using tensor::DType;

std::string merged_blob(const std::vector<std::string>& blobs) {
  return encode_inventory(test::merged(blobs));
}

/// (fqn, offsets, sizes) -> ranks that hold it.
using Holders = std::map<std::pair<std::string, std::pair<tensor::Dims, tensor::Dims>>, std::set<uint32_t>>;

Holders holders_in(const test::World& world) {
  Holders holders;
  for (uint32_t rank = 0; rank < world.size(); ++rank) {
    for (const test::HeldEntry& e : world[rank]) {
      const tensor::Box box = e.boxes.empty() ? tensor::whole(e.info.sizes) : e.boxes[0];
      holders[{e.fqn, {box.offsets, box.sizes}}].insert(rank);
    }
  }
  return holders;
}

Holders holders_in(const Inventory& inventory) {
  Holders holders;
  for (const Entry& entry : inventory.entries) {
    for (size_t b = 0; b < entry.num_boxes; ++b) {
      const tensor::Box box = inventory.box(entry, b);
      auto& ranks = holders[{std::string(inventory.fqn(entry)), {box.offsets, box.sizes}}];
      REQUIRE(ranks.empty());
      inventory.rank_sets.for_each(inventory.box_holders(entry, b), [&](uint32_t rank) { ranks.insert(rank); });
    }
  }
  return holders;
}

std::vector<std::string> names_in_order(const test::World& world) {
  std::vector<std::string> names;
  for (const auto& held : world) {
    for (const test::HeldEntry& e : held) {
      if (std::find(names.begin(), names.end(), e.fqn) == names.end()) names.push_back(e.fqn);
    }
  }
  return names;
}

TEST_CASE("merge_inventories: each box once with all its holders, entries by first appearance") {
  test::Random random(20);
  for (int round = 0; round < 600; ++round) {
    const test::World world = test::draw_world(&random, static_cast<uint32_t>(test::draw(&random, 1, 16)));
    const Inventory inventory = test::merged(test::blobs_of(world));
    REQUIRE(inventory.rank_sets.size(inventory.ranks) == world.size());
    REQUIRE(holders_in(inventory) == holders_in(world));
    std::vector<std::string> names;
    for (const Entry& entry : inventory.entries) names.emplace_back(inventory.fqn(entry));
    REQUIRE(names == names_in_order(world));
  }
}

TEST_CASE("merge_inventories: any tree of any order gives the same bytes") {
  test::Random random(21);
  for (int round = 0; round < 400; ++round) {
    std::vector<std::string> blobs =
        test::blobs_of(test::draw_world(&random, static_cast<uint32_t>(test::draw(&random, 1, 16))));
    const std::string at_once = merged_blob(blobs);
    REQUIRE(merged_blob({at_once}) == at_once);
    while (blobs.size() > 1) {
      std::shuffle(blobs.begin(), blobs.end(), random);
      const auto take = static_cast<std::ptrdiff_t>(test::draw(&random, 1, static_cast<int64_t>(blobs.size())));
      const std::vector<std::string> children(blobs.end() - take, blobs.end());
      blobs.erase(blobs.end() - take, blobs.end());
      blobs.push_back(merged_blob(children));
    }
    REQUIRE(blobs[0] == at_once);
  }
}

TEST_CASE("merge_inventories: replicas travel once") {
  test::World world(1000);
  test::add_replicated(&world, "replicated", test::info_of({64, 64}));
  CHECK(merged_blob(test::blobs_of(world)).size() < 50);
  // HSDP: 8 replicas of 125 shards, so there are 125 sets of holders.
  test::Mesh mesh{{}, {8, 125}, {-1, 0}};
  for (uint32_t rank = 0; rank < 1000; ++rank) mesh.ranks.push_back(rank);
  for (int i = 0; i < 10; ++i) test::add_sharded(&world, "w" + std::to_string(i), test::info_of({1000, 64}), mesh);
  CHECK(merged_blob(test::blobs_of(world)).size() < 125 * 10 * 8 + 125 * 6 + 200);
}

TEST_CASE("merge_inventories: the lowest rank's properties count, one objection stops splits") {
  tensor::TensorInfo low = test::info_of({4});
  tensor::TensorInfo high = test::info_of({4});
  high.requires_grad = high.pin_memory = true;
  high.memory_format = 2;
  const std::string of_0 =
      test::blob_of(0, {{"other", EntryKind::kBytes, "", {}, {}, {}}, {"w", EntryKind::kTensor, "low", low, true, {}}});
  const std::string of_1 = test::blob_of(1, {{"w", EntryKind::kTensor, "a longer path", high, false, {}}});
  for (const auto& blobs : {std::vector<std::string>{of_0, of_1}, {of_1, of_0}}) {
    const Inventory inventory = test::merged(blobs);
    REQUIRE(inventory.entries.size() == 2);
    const Entry& entry = inventory.entries[1];
    CHECK(inventory.path(entry) == "low");
    CHECK_FALSE(entry.requires_grad);
    CHECK_FALSE(entry.pin_memory);
    CHECK(entry.memory_format == 0);
    CHECK_FALSE(entry.can_split);
    CHECK(entry.first_rank == 0);
    CHECK(entry.ordinal == 1);
  }
}

TEST_CASE("merge_inventories: ranks that disagree are named, the lower one first") {
  const auto of = [](uint32_t rank, EntryKind kind, const tensor::TensorInfo& info) {
    return test::blob_of(rank, {{"before", EntryKind::kTensor, "", test::info_of({7, 8}), true, {}},
                                {"layers.0", kind, "", info, true, {tensor::whole(info.sizes)}}});
  };
  const std::string whole = of(2, EntryKind::kTensor, test::info_of({2, 3}));
  const struct {
    std::string other;
    const char* part;
  } cases[] = {
      {of(5, EntryKind::kTensor, test::info_of({2, 3}, DType::kFloat32)),
       "'layers.0': rank 2 has a plain tensor, bfloat16 [2, 3], rank 5 has a plain tensor, float32 [2, 3]"},
      {of(5, EntryKind::kTensor, test::info_of({3, 2})), "rank 5 has a plain tensor, bfloat16 [3, 2]"},
      {of(5, EntryKind::kTensor, test::info_of({2, 3, 1})), "rank 5 has a plain tensor, bfloat16 [2, 3, 1]"},
      {of(5, EntryKind::kShard, test::info_of({2, 3})), "rank 5 has shards of a tensor, bfloat16 [2, 3]"},
      {of(5, EntryKind::kBytes, {}), "rank 5 has an object"},
  };
  for (const auto& c : cases) {
    EXPECT_FAILURE(kInvalidArgument, c.part, merge_inventories({whole, c.other}));
    EXPECT_FAILURE(kInvalidArgument, c.part, merge_inventories({c.other, whole}));
  }
}

TEST_CASE("merge_inventories: a rank twice, no inventory, damage") {
  test::World world(3);
  test::add_replicated(&world, "w", test::info_of({4}));
  const std::vector<std::string> blobs = test::blobs_of(world);
  const std::string both = merged_blob({blobs[0], blobs[1]});
  EXPECT_FAILURE(kInvalidArgument, "rank 1 is in two", merge_inventories({both, blobs[1]}));
  EXPECT_OK(merge_inventories({both, blobs[2]}));
  EXPECT_CODE(kInvalidArgument, merge_inventories({}));
  EXPECT_CODE(kCorrupt, merge_inventories({both, ""}));
}

TEST_CASE("merge_inventories: numbers of more than 32 bits, in some boxes of some ranks") {
  constexpr int64_t kBig = int64_t{1} << 40;
  const auto one_of = [](const std::string& fqn, int64_t begin, int64_t size) {
    return test::HeldEntry{fqn, EntryKind::kShard, "", test::info_of({kBig}), true, {{{begin}, {size}}}};
  };
  test::World world(4);
  world[0] = {one_of("a", 0, 7), one_of("b", 0, 7)};
  world[1] = {one_of("a", 7, kBig - 7), one_of("b", 7, 5)};
  world[2] = {one_of("a", 7, kBig - 7), one_of("b", 7, 5)};
  world[3] = {one_of("a", 0, 7), one_of("b", 0, 7)};
  const std::vector<std::string> blobs = test::blobs_of(world);
  for (const Inventory& merged : {test::merged(blobs), test::merged({blobs[3], blobs[1], blobs[0], blobs[2]}),
                                  test::merged({merged_blob({blobs[3], blobs[0]}), blobs[2], blobs[1]})}) {
    CHECK(merged.num_boxes() == 4);
    CHECK(merged.entries[0].is_wide);
    CHECK_FALSE(merged.entries[1].is_wide);
    CHECK(holders_in(merged) == holders_in(world));
    std::vector<int64_t> numbers;
    merged.unpack_boxes(merged.entries[0], &numbers);
    CHECK(numbers == std::vector<int64_t>{0, 7, 7, kBig - 7});
    CHECK(merged_blob({encode_inventory(merged)}) == encode_inventory(merged));
  }
}

TEST_CASE("merge_inventories: one rank among many alike has less, more, or in another order") {
  constexpr uint32_t kNumRanks = 9;
  const auto shards = [](uint32_t rank) {
    std::vector<test::HeldEntry> held;
    for (const char* fqn : {"a", "b", "c"}) {
      held.push_back({fqn, EntryKind::kShard, "", test::info_of({kNumRanks}), true, {{{rank}, {1}}}});
    }
    return held;
  };
  for (uint32_t other = 0; other < kNumRanks; ++other) {
    for (int how = 0; how < 5; ++how) {
      test::World world(kNumRanks);
      for (uint32_t rank = 0; rank < kNumRanks; ++rank) world[rank] = shards(rank);
      std::vector<test::HeldEntry>& held = world[other];
      if (how == 1) held.erase(held.begin() + 1);
      if (how == 2) held.insert(held.begin() + 1, {"d", EntryKind::kBytes, "", {}, false, {}});
      if (how == 3) held[1].boxes = {{{0}, {1}}, {{4}, {1}}, {{other}, {0}}};
      if (how == 4) std::swap(held[0], held[2]);
      // Merging one by one never finds many alike.
      const std::vector<std::string> blobs = test::blobs_of(world);
      std::string one_by_one = blobs[0];
      for (size_t i = 1; i < blobs.size(); ++i) one_by_one = merged_blob({one_by_one, blobs[i]});
      REQUIRE(merged_blob(blobs) == one_by_one);
      REQUIRE(merged_blob({blobs.rbegin(), blobs.rend()}) == one_by_one);
      if (how != 3) REQUIRE(holders_in(test::merged(blobs)) == holders_in(world));
    }
  }
}

TEST_CASE("merge_below: a tree of ranks gives what all of them at once do") {
  test::Random random(24);
  for (int round = 0; round < 200; ++round) {
    const auto num_ranks = static_cast<uint32_t>(test::draw(&random, 1, 16));
    const test::World world = test::draw_world(&random, num_ranks);
    const auto fan_out = static_cast<uint32_t>(test::draw(&random, 1, 5));
    std::vector<std::string> handed_up(num_ranks);
    for (uint32_t rank = num_ranks; rank-- > 0;) {
      std::vector<std::string_view> below;
      for (uint32_t child = fan_out * rank + 1; child <= fan_out * rank + fan_out && child < num_ranks; ++child) {
        below.push_back(handed_up[child]);
      }
      handed_up[rank] = encode_inventory(test::value_of(merge_below(test::blob_of(0, world[rank]), rank, below)));
    }
    CHECK(handed_up[0] == merged_blob(test::blobs_of(world)));
  }
  const std::string of_rank_0 = test::blob_of(0, {});
  // the same inventory twice
  CHECK(merge_below(of_rank_0, 0, {of_rank_0}).status().code() == base::Code::kInvalidArgument);
}

TEST_CASE("merge_ranks: ranks that do not know their numbers, by their order") {
  test::Random random(27);
  for (int round = 0; round < 100; ++round) {
    const test::World world = test::draw_world(&random, 1 + static_cast<uint32_t>(round % 6));
    std::vector<std::string> nameless;
    for (const auto& held : world) nameless.push_back(test::blob_of(0, held));
    const Inventory merged = test::value_of(merge_ranks({nameless.begin(), nameless.end()}));
    CHECK(encode_inventory(merged) == merged_blob(test::blobs_of(world)));
  }
  const std::string of_two = merged_blob({test::blob_of(0, {}), test::blob_of(1, {})});
  CHECK(merge_ranks({of_two}).status().code() == base::Code::kCorrupt);
  CHECK_FALSE(merge_ranks({}).is_ok());
}

TEST_CASE("merge_inventories: a rank without entries is a rank") {
  const Inventory inventory = test::merged({test::blob_of(0, {}), test::blob_of(1, {})});
  CHECK(inventory.entries.empty());
  CHECK(inventory.rank_sets.size(inventory.ranks) == 2);
}

}  // namespace
}  // namespace bytecheckpoint::planner
