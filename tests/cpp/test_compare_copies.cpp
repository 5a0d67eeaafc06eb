// SPDX-License-Identifier: Apache-2.0
#include "csrc/planner/compare_copies.h"

#include "csrc/planner/inventory_blob.h"
#include "csrc/planner/merge_inventories.h"
#include "csrc/planner/save_plan.h"
#include "tests/cpp/expect.h"

namespace bytecheckpoint::planner {
namespace {

using tensor::DType;

/// What one rank holds of `fqn`: a plain tensor, or one box of rows on a mesh.
struct Held {
  std::string fqn;
  uint32_t checksum;
  uint32_t mesh = 0;
  int64_t first_row = 0, num_rows = 4;
  uint32_t how = HeldCopy::kWhole;
};

constexpr int64_t kRows = 4;

struct Ranks {
  std::vector<std::string> inventories, copies;

  void add(const std::vector<Held>& of_rank) {
    InventoryBuilder builder(0);
    std::vector<HeldCopy> held;
    for (const Held& h : of_rank) {
      tensor::TensorInfo info;
      info.dtype = DType::kFloat32;
      info.sizes = {kRows, 2};
      const tensor::Box box{{h.first_row, 0}, {h.num_rows, 2}};
      const EntryKind kind = h.mesh == 0 ? EntryKind::kTensor : EntryKind::kShard;
      REQUIRE(builder.add(h.fqn, kind, "", info, h.mesh != 0, {box}).is_ok());
      const int64_t numbers[] = {h.first_row, 0, h.num_rows, 2};
      held.push_back({key_of_copy(h.fqn, numbers, 2), h.mesh, h.how, h.checksum});
    }
    sort_copies(&held);
    inventories.push_back(encode_inventory(test::value_of(builder.finish())));
    copies.push_back(encode_copies(held));
  }

  Inventory merged() const { return test::value_of(merge_ranks({inventories.begin(), inventories.end()})); }
  base::Result<Comparison> compare(Inventory* inventory, const std::vector<std::string>& known = {}) const {
    std::vector<EncodedCopies> encoded;
    for (const std::string& of_rank : copies) encoded.push_back({of_rank, static_cast<uint32_t>(encoded.size())});
    return compare_copies(test::value_of(merge_copies(encoded)), known, inventory);
  }
};

std::vector<uint32_t> ranks_of(const Inventory& inventory, RankSets::Id id) {
  std::vector<uint32_t> ranks;
  inventory.rank_sets.for_each(id, [&](uint32_t rank) { ranks.push_back(rank); });
  return ranks;
}

TEST_CASE("compare_copies: the lowest rank writes what differs, all may write what is equal") {
  Ranks ranks;
  ranks.add({{"a", 1}, {"b", 5}, {"c", 7}});
  ranks.add({{"a", 2}, {"b", 5}, {"c", 7}});
  ranks.add({{"a", 1}, {"b", 5}});
  Inventory inventory = ranks.merged();
  const Comparison found = test::value_of(ranks.compare(&inventory));
  REQUIRE(found.differing.size() == 1);
  CHECK(found.differing[0].fqn == "a");
  CHECK(found.differing[0].kind == "a plain tensor, float32 [4, 2]");
  CHECK(found.differing[0].ranks == std::vector<std::vector<uint32_t>>{{0, 2}, {1}});
  CHECK(ranks_of(inventory, inventory.writers[0]) == std::vector<uint32_t>{0});
  CHECK(ranks_of(inventory, inventory.writers[1]) == std::vector<uint32_t>{0, 1, 2});
  CHECK(test::value_of(plan_save(inventory, {})).writers[0] == 0);
}

TEST_CASE("compare_copies: what was not looked at alike is not compared") {
  Ranks ranks;
  ranks.add({{"a", 1}, {"b", 1, 0, 0, kRows, 77}});
  ranks.add({{"a", 2, 0, 0, kRows, HeldCopy::kNothing}, {"b", 2, 0, 0, kRows, 78}});
  Inventory inventory = ranks.merged();
  const Comparison found = test::value_of(ranks.compare(&inventory));
  CHECK(found.differing.empty());
  CHECK(inventory.writers.empty());
}

TEST_CASE("compare_copies: keys that differed before go on to be written by the lowest rank") {
  Ranks ranks;
  ranks.add({{"a", 1}});
  ranks.add({{"a", 1}});
  Inventory inventory = ranks.merged();
  const Comparison found = test::value_of(ranks.compare(&inventory, {"a"}));
  CHECK(found.differing.empty());
  CHECK(ranks_of(inventory, inventory.writers[0]) == std::vector<uint32_t>{0});
  CHECK(found.groups == std::vector<std::string>(2, std::string({1, 0})));  // it is not compared by hashes either
}

TEST_CASE("compare_copies: equal tensors on several meshes are written by one mesh each, in turn") {
  Ranks ranks;
  for (uint32_t rank = 0; rank < 4; ++rank) {
    const uint32_t mesh = rank / 2 + 2, first = rank % 2 * 2, checksum = 10 + rank % 2;
    ranks.add({{"a", checksum, mesh, first, 2}, {"b", checksum, mesh, first, 2}, {"c", checksum, mesh, first, 2}});
  }
  Inventory inventory = ranks.merged();
  test::value_of(ranks.compare(&inventory));
  const std::vector<uint32_t> wanted = {0, 1, 2, 3, 0, 1};
  for (size_t box = 0; box < wanted.size(); ++box) {
    CHECK(ranks_of(inventory, inventory.writers[box]) == std::vector<uint32_t>{wanted[box]});
  }
  CHECK(test::value_of(plan_save(inventory, {})).writers == wanted);
}

TEST_CASE("compare_copies: differing tensors on several meshes are refused, on one mesh they are not compared") {
  const auto compare = [](uint32_t mesh_of_rank_1) {
    Ranks ranks;
    ranks.add({{"experts.w", 1, 2}});
    ranks.add({{"experts.w", 2, mesh_of_rank_1}});
    Inventory inventory = ranks.merged();
    return ranks.compare(&inventory).status();
  };
  CHECK(compare(2).is_ok());
  const base::Status refused = compare(3);
  CHECK(refused.code() == base::Code::kInvalidArgument);
  CHECK(refused.message().find("'experts.w' (rank 0 against rank 1)") != std::string::npos);
}

TEST_CASE("compare_copies: equal hashes of groups mean equal copies") {
  Ranks ranks;
  ranks.add({{"a", 1}, {"b", 5}});
  ranks.add({{"a", 1}, {"b", 6}});
  Inventory inventory = ranks.merged();
  const Comparison found = test::value_of(ranks.compare(&inventory));
  const auto hashes = [&](uint32_t rank, uint32_t of_a, uint32_t of_b) {
    const int64_t box[] = {0, 0, kRows, 2};
    std::vector<HeldCopy> held = {{key_of_copy("a", box, 2), 0, HeldCopy::kWhole, of_a},
                                  {key_of_copy("b", box, 2), 0, HeldCopy::kWhole, of_b}};
    sort_copies(&held);
    return test::value_of(hashes_of_groups(held, found.groups[rank]));
  };
  CHECK(hashes(0, 1, 5) == hashes(1, 1, 6));
  CHECK(hashes(0, 3, 7) == hashes(1, 3, 8));
  CHECK(hashes(0, 1, 5) != hashes(1, 3, 5));
}

}  // namespace
}  // namespace bytecheckpoint::planner
