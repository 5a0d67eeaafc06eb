// SPDX-License-Identifier: Apache-2.0
#include "csrc/planner/inventory_blob.h"

#include <algorithm>
#include <numeric>

#include "csrc/planner/merge_inventories.h"
#include "csrc/planner/rank_assignment.h"
#include "csrc/planner/save_plan.h"
#include "tests/cpp/expect.h"
#include "tests/cpp/mutate.h"
#include "tests/cpp/random_world.h"
#include "tests/cpp/rounds.h"

namespace bytecheckpoint::planner {
namespace {

using tensor::Box;

TEST_CASE("inventory_blob: a rank's entries come back from their bytes as they were given") {
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

/// Everything that later code relies on without checking again.
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

/// All that a reader says of a blob, and the failure, if any, that ends it.
std::string read_all(InventoryReader* reader, std::string_view blob) {
  std::string read;
  base::Status status = reader->begin(blob);
  if (!status.is_ok()) return status.message();
  while (reader->next()) {
    const Entry& e = reader->entry();
    read += base::text("|", reader->position(), " ", static_cast<int>(e.kind), " ", e.can_split, " ",
                       static_cast<int>(e.dtype), " ", e.requires_grad, e.pin_memory, " ", int{e.memory_format}, " ",
                       e.first_rank, " ", e.ordinal, " ", e.num_boxes, " ", reader->fqn(), " ", reader->path(), ":");
    for (size_t d = 0; d < e.num_dims; ++d) read += base::text(" ", reader->sizes()[d]);
    for (uint32_t b = 0; b < e.num_boxes && reader->next_box(); ++b) {
      read += base::text(";", reader->box_holders(), reader->is_wide() ? "w" : "");
      const size_t num_numbers = e.kind == EntryKind::kShard ? 2 * size_t{e.num_dims} : 0;
      for (size_t i = 0; i < num_numbers; ++i) read += base::text(" ", reader->box_dims()[i]);
    }
  }
  return read + reader->end().message();
}

TEST_CASE("inventory_blob: a reader that remembers heads reads what one that does not reads") {
  test::Random random(8);
  size_t num_repeated = 0;
  for (int round = 0; round < 300; ++round) {
    const test::World world = test::draw_world(&random, static_cast<uint32_t>(test::draw(&random, 1, 12)));
    std::vector<std::string> blobs = test::blobs_of(world);
    blobs.push_back(encode_inventory(test::merged(blobs)));
    for (const std::string& blob : test::blobs_of(test::draw_world(&random, 2))) blobs.push_back(blob);
    if (round % 2 == 0) std::shuffle(blobs.begin(), blobs.end(), random);
    RankSets sets;
    InventoryReader remembers(&sets, true);
    for (const std::string& blob : blobs) {
      InventoryReader forgets(&sets);
      REQUIRE(read_all(&remembers, blob) == read_all(&forgets, blob));
      num_repeated += blob.size() > 10 && remembers.is_repeated() ? 1 : 0;
    }
    // Damage ends the use of a reader, so that each damaged blob needs another one.
    test::Mutator mutate(static_cast<uint64_t>(round), blobs, std::string("\0\x01\x80", 3));
    for (int damaged = 0; damaged < 20; ++damaged) {
      const std::string blob = mutate(blobs[mutate.below(blobs.size())]);
      InventoryReader again(&sets, true), forgets(&sets);
      (void)read_all(&again, blobs[static_cast<size_t>(damaged) % blobs.size()]);
      REQUIRE(read_all(&again, blob) == read_all(&forgets, blob));
    }
  }
  CHECK(num_repeated > 300);
}

TEST_CASE("inventory_blob: damaged bytes are refused or read as something valid") {
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
  int num_planned = 0;
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
    // Next a coordinator refuses it, or plans for every rank.
    const Inventory& inventory = decoded.value();
    if (inventory.rank_sets.size(inventory.ranks) > 1000) continue;
    const auto plan = plan_save(inventory, {});
    if (!plan.is_ok()) continue;
    ++num_planned;
    REQUIRE(encode_assignments(inventory, plan.value()).size() == inventory.rank_sets.size(inventory.ranks));
  }
  CHECK(num_planned > 100);
  CHECK(num_read > 100);
}

TEST_CASE("inventory_blob: damaged bytes can be merged, or are refused, in any order") {
  test::Random random(9);
  std::vector<std::string> blobs;
  for (int i = 0; i < 40; ++i) {
    const std::vector<std::string> of_ranks = test::blobs_of(test::draw_world(&random, 6));
    // Two halves of a world. Each half knows its own ranks.
    blobs.push_back(encode_inventory(test::merged({of_ranks[0], of_ranks[2], of_ranks[4]})));
    blobs.push_back(encode_inventory(test::merged({of_ranks[1], of_ranks[3], of_ranks[5]})));
  }
  test::Mutator mutate(10, blobs, std::string("\0\x01\x02\x7F\x80\xFF", 6));
  int num_merged = 0;
  int num_refused = 0;
  for (int round = 0; round < test::rounds(40000); ++round) {
    const size_t pair = mutate.below(blobs.size() / 2);
    std::vector<std::string> halves{mutate(blobs[2 * pair]), blobs[2 * pair + 1]};
    if (round % 4 == 0) halves[1] = mutate(halves[1]);
    bool is_small = true;  // a million ranks take long, and test no more than a thousand
    for (const std::string& half : halves) {
      const auto decoded = decode_inventory(half);
      is_small &= !decoded.is_ok() || decoded.value().rank_sets.highest(decoded.value().ranks) < 1000;
    }
    if (!is_small) continue;
    const auto merged = merge_inventories({halves[0], halves[1]});
    const auto turned = merge_inventories({halves[1], halves[0]});
    REQUIRE(merged.is_ok() == turned.is_ok());
    if (!merged.is_ok()) {
      REQUIRE(
          (merged.status().code() == base::Code::kCorrupt || merged.status().code() == base::Code::kInvalidArgument));
      ++num_refused;
      continue;
    }
    ++num_merged;
    check_decoded(merged.value(), halves[0].size() + halves[1].size());
    const std::string bytes = encode_inventory(merged.value());
    REQUIRE(encode_inventory(turned.value()) == bytes);
    REQUIRE(encode_inventory(test::value_of(decode_inventory(bytes))) == bytes);
  }
  CHECK(num_merged > test::rounds(1000));
  CHECK(num_refused > test::rounds(1000));
}

TEST_CASE("inventory_blob: very many ranks that several claim are refused in little memory") {
  // 2000 blobs of a million ranks each. Unrolled they would take 8 GB.
  std::vector<uint32_t> ranks(kMaxRanks);
  std::iota(ranks.begin(), ranks.end(), 0u);
  Inventory all;
  all.ranks = all.rank_sets.intern(ranks);
  const std::string blob = encode_inventory(all);
  EXPECT_FAILURE(kInvalidArgument, "rank 0 is in two inventories",
                 merge_inventories(std::vector<std::string_view>(2000, blob)));
  EXPECT_FAILURE(kInvalidArgument, "must be below 1048576", merge_below(blob, kMaxRanks, {}));
}

TEST_CASE("inventory_blob: every cut is damage") {
  test::Random random(8);
  const std::string blob = encode_inventory(test::merged(test::blobs_of(test::draw_world(&random, 6))));
  for (size_t size = 0; size < blob.size(); ++size) EXPECT_CODE(kCorrupt, decode_inventory(blob.substr(0, size)));
  EXPECT_FAILURE(kCorrupt, "damaged at byte", decode_inventory(blob + '\0'));
}

}  // namespace
}  // namespace bytecheckpoint::planner
