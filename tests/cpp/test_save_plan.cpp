// SPDX-License-Identifier: Apache-2.0
#include "csrc/planner/save_plan.h"

#include <map>
#include <numeric>

#include "csrc/planner/inventory_blob.h"
#include "csrc/planner/rank_assignment.h"
#include "tests/cpp/expect.h"
#include "tests/cpp/random_world.h"
#include "tests/cpp/rounds.h"

namespace bytecheckpoint::planner {
namespace {

using tensor::Box;
using tensor::Dims;
using tensor::DType;

constexpr int64_t kMiB = 1 << 20;

double ratio(const SavePlan& plan) {
  return static_cast<double>(plan.max_bytes()) * static_cast<double>(plan.rank_bytes.size()) /
         static_cast<double>(plan.total_bytes());
}

SavePlan plan_of(const test::World& world, const SaveOptions& options = {}) {
  return test::value_of(plan_save(test::merged(test::blobs_of(world)), options));
}

/// Maps (fqn, element) to the ranks of `world` that write it by their assignments. Objects have one element without
/// dims.
std::map<std::pair<std::string, Dims>, std::vector<uint32_t>> written(const test::World& world,
                                                                      const std::vector<std::string>& answers) {
  std::map<std::pair<std::string, Dims>, std::vector<uint32_t>> writers;
  for (uint32_t rank = 0; rank < world.size(); ++rank) {
    const Inventory local = test::value_of(decode_inventory(test::blob_of(rank, world[rank])));
    for (const PlannedWrite& write : test::value_of(apply_assignment(local, answers[rank]))) {
      const test::HeldEntry& held = world[rank].at(write.entry);
      const Box box = held.boxes.empty() ? tensor::whole(held.info.sizes) : held.boxes.at(0);
      REQUIRE((write.is_whole ? write.box == box : !(write.box == box)));
      for (size_t d = 0; d < box.sizes.size(); ++d) {  // no rank writes what it does not hold
        REQUIRE(write.box.offsets[d] >= box.offsets[d]);
        REQUIRE(write.box.offsets[d] + write.box.sizes[d] <= box.offsets[d] + box.sizes[d]);
      }
      test::for_each_index(write.box.sizes, [&](Dims index) {
        for (size_t d = 0; d < index.size(); ++d) index[d] += write.box.offsets[d];
        writers[{held.fqn, index}].push_back(rank);
      });
    }
  }
  return writers;
}

/// Checks that every held element is written once, and that the metadata matches.
void check_plan(const test::World& world, const SaveOptions& options) {
  const Inventory inventory = test::merged(test::blobs_of(world));
  const SavePlan plan = test::value_of(plan_save(inventory, options));
  const std::vector<std::string> answers = encode_assignments(inventory, plan);
  REQUIRE(answers.size() == world.size());
  auto writers = written(world, answers);
  for (const auto& [element, ranks] : writers) REQUIRE(ranks.size() == 1);
  for (const auto& held : world) {
    for (const test::HeldEntry& e : held) {
      const Box box = e.boxes.empty() ? tensor::whole(e.info.sizes) : e.boxes[0];
      test::for_each_index(box.sizes, [&](Dims index) {
        for (size_t d = 0; d < index.size(); ++d) index[d] += box.offsets[d];
        REQUIRE(writers.count({e.fqn, index}) == 1);
      });
    }
  }
  std::vector<int64_t> rank_bytes(world.size(), 0);
  size_t num_elements = 0;
  for (const Entry& entry : inventory.entries) {
    const std::vector<PlannedChunk> chunks = chunks_of(inventory, plan, entry);
    REQUIRE_FALSE(chunks.empty());
    for (size_t i = 0; i < chunks.size(); ++i) {
      if (i != 0) {
        REQUIRE(chunks[i - 1].rank <= chunks[i].rank);
        for (size_t j = 0; j < i; ++j) REQUIRE(chunks[j].box.offsets != chunks[i].box.offsets);
      }
      int64_t numel = 0;
      REQUIRE(tensor::checked_numel(chunks[i].box.sizes, &numel));
      num_elements += static_cast<size_t>(numel);
      if (entry.is_tensor()) {
        rank_bytes[chunks[i].rank] += numel * std::max<int64_t>(tensor::find_dtype(entry.dtype)->itemsize_bytes, 1);
      }
      test::for_each_index(chunks[i].box.sizes, [&](Dims index) {
        for (size_t d = 0; d < index.size(); ++d) index[d] += chunks[i].box.offsets[d];
        REQUIRE(writers[{std::string(inventory.fqn(entry)), index}] == std::vector<uint32_t>{chunks[i].rank});
      });
    }
  }
  REQUIRE(num_elements == writers.size());
  REQUIRE(rank_bytes == plan.rank_bytes);
}

TEST_CASE("save_plan: every element is written once, by a rank that holds it") {
  test::Random random(40);
  for (int round = 0; round < test::rounds(1500); ++round) {
    const test::World world = test::draw_world(&random, static_cast<uint32_t>(test::draw(&random, 1, 16)));
    SaveOptions options;
    options.min_part_bytes = int64_t{1} << test::draw(&random, 0, 8);
    options.dedup_to_lowest_rank = test::draw(&random, 0, 5) == 0;
    const Inventory inventory = test::merged(test::blobs_of(world));
    // draw_mesh may leave out ranks, but only as replicas, so nothing is missing
    if (!plan_save(inventory, options).is_ok()) {
      REQUIRE(world.size() > 1);
      FAIL("a plan was refused");
    }
    check_plan(world, options);
  }
}

/// The boxes have many elements and their records cost little, so balance is by elements and splits are common.
TEST_CASE("save_plan: split boxes, too") {
  test::Random random(41);
  int num_splits = 0;
  for (int round = 0; round < test::rounds(150); ++round) {
    const auto num_ranks = static_cast<uint32_t>(test::draw(&random, 2, 12));
    test::World world(num_ranks);
    for (int64_t e = test::draw(&random, 1, 4); e > 0; --e) {
      const tensor::TensorInfo info = test::info_of(
          {test::draw(&random, 1, 2), test::draw(&random, 1, 60), test::draw(&random, 1, 60)}, DType::kComplex128);
      if (test::draw(&random, 0, 1) == 0) {
        test::add_replicated(&world, "w" + std::to_string(e), info);
      } else {
        test::add_sharded(&world, "w" + std::to_string(e), info, test::draw_mesh(&random, num_ranks, 3));
      }
    }
    SaveOptions options;
    options.min_part_bytes = int64_t{1} << test::draw(&random, 4, 14);
    check_plan(world, options);
    num_splits += static_cast<int>(plan_of(world, options).first_part.size()) - 1;
  }
  CHECK(num_splits > test::rounds(100));
}

TEST_CASE("save_plan: the same whatever the order and the tree of merging") {
  test::Random random(42);
  for (int round = 0; round < test::rounds(200); ++round) {
    const auto num_ranks = static_cast<uint32_t>(test::draw(&random, 2, 16));
    std::vector<std::string> blobs = test::blobs_of(test::draw_world(&random, num_ranks));
    SaveOptions options;
    options.min_part_bytes = 16;
    const Inventory at_once = test::merged(blobs);
    const auto answers = encode_assignments(at_once, test::value_of(plan_save(at_once, options)));
    std::shuffle(blobs.begin(), blobs.end(), random);
    const auto half = blobs.begin() + static_cast<std::ptrdiff_t>(blobs.size() / 2);
    const Inventory by_tree = test::merged(
        {encode_inventory(test::merged({half, blobs.end()})), encode_inventory(test::merged({blobs.begin(), half}))});
    REQUIRE(encode_assignments(by_tree, test::value_of(plan_save(by_tree, options))) == answers);
  }
}

TEST_CASE("save_plan: ties go to the lower rank, the rest to the least loaded") {
  test::World world(4);
  for (int i = 0; i < 6; ++i) test::add_replicated(&world, "w" + std::to_string(i), test::info_of({1024}));
  CHECK(plan_of(world).writers == std::vector<uint32_t>{0, 1, 2, 3, 0, 1});
  // Ranks 0 and 2 already hold data of their own, rank 2 more.
  world[0].push_back({"own 0", EntryKind::kTensor, "", test::info_of({1500}), true, {}});
  world[2].push_back({"own 2", EntryKind::kTensor, "", test::info_of({4000}), true, {}});
  CHECK(plan_of(world).writers == std::vector<uint32_t>{1, 3, 1, 3, 0, 1, 0, 2});
}

TEST_CASE("save_plan: smallest sets of holders first, then largest boxes") {
  // If "of all" were assigned first, rank 0 would get it and "of 0 and 1" would have to go to rank 1: 30, 20, 0.
  test::World world(3);
  test::add_replicated(&world, "of all", test::info_of({30000}), false);
  test::add_sharded(&world, "of 0 and 1", test::info_of({20000}), test::Mesh{{0, 1}, {2}, {-1}}, false);
  test::add_replicated(&world, "small", test::info_of({5000}), false);
  CHECK(plan_of(world).writers == std::vector<uint32_t>{1, 0, 2});
}

TEST_CASE("save_plan: to the lowest rank, if asked") {
  test::World world(4);
  test::add_replicated(&world, "a", test::info_of({1 << 20}));
  test::add_replicated(&world, "b", test::info_of({1 << 20}));
  test::add_sharded(&world, "c", test::info_of({1 << 20}), test::Mesh{{3, 2, 1, 0}, {2, 2}, {-1, 0}});
  SaveOptions options;
  options.dedup_to_lowest_rank = true;
  const SavePlan plan = plan_of(world, options);
  CHECK(plan.writers == std::vector<uint32_t>{0, 0, 1, 0});
  CHECK(plan.parts.empty());
  CHECK(plan.rank_bytes == std::vector<int64_t>{5 * kMiB, 1 * kMiB, 0, 0});
}

TEST_CASE("save_plan: objects are written by the lowest of those that have them") {
  test::World world(3);
  for (uint32_t rank : {1u, 2u}) world[rank].push_back({"step", EntryKind::kBytes, "", {}, {}, {}});
  for (auto& held : world) held.push_back({"rng", EntryKind::kBytes, "", {}, {}, {}});
  CHECK(plan_of(world).writers == std::vector<uint32_t>{0, 1});  // "rng" comes first on rank 0
}

TEST_CASE("save_plan: what may not be split is not") {
  test::World world(4);
  test::add_replicated(&world, "forbidden", test::info_of({1 << 22}), false);
  test::add_replicated(&world, "opaque", test::info_of({1 << 23}, DType::kQInt8));
  test::add_replicated(&world, "one row", test::info_of({1, 1, 1}));
  test::add_replicated(&world, "small", test::info_of({65535}));
  CHECK(plan_of(world).parts.empty());
  // One rank's objection is enough.
  test::World other(4);
  test::add_replicated(&other, "w", test::info_of({1 << 22}));
  CHECK(plan_of(other).parts.size() == 4);
  other[2][0].can_split = false;
  CHECK(plan_of(other).parts.empty());
}

TEST_CASE("save_plan: parts are rows of the outermost dim above 1, none below the least") {
  test::World world(4);
  test::add_replicated(&world, "w", test::info_of({1, 1024, 1024}));
  const Inventory inventory = test::merged(test::blobs_of(world));
  const auto chunks = chunks_of(inventory, test::value_of(plan_save(inventory, {})), inventory.entries[0]);
  REQUIRE(chunks.size() == 4);
  for (uint32_t rank = 0; rank < 4; ++rank) {
    CHECK(chunks[rank].rank == rank);
    CHECK(chunks[rank].box == Box{{0, 256 * int64_t{rank}, 0}, {1, 256, 1024}});
  }
  test::World many(100);  // 2 MiB among 100 ranks: parts of 64 KiB
  test::add_replicated(&many, "w", test::info_of({1024, 1024}));
  const SavePlan plan = plan_of(many);
  CHECK(plan.parts.size() > 16);
  for (const Part& part : plan.parts) CHECK(part.num_rows >= 32);
  CHECK(plan.max_bytes() < 128 << 10);
}

TEST_CASE("save_plan: parts are all of the box, and never too small, whatever ranks lack") {
  test::Random random(43);
  for (int round = 0; round < test::rounds(3000); ++round) {
    test::World world(static_cast<size_t>(test::draw(&random, 2, 40)));
    const int64_t num_rows = test::draw(&random, 2, 200);
    for (auto& held : world) {
      held.push_back({"own " + std::to_string(&held - world.data()),
                      EntryKind::kTensor,
                      "",
                      test::info_of({test::draw(&random, 0, 2) * test::draw(&random, 0, 200) * 1024}),
                      true,
                      {}});
    }
    test::add_replicated(&world, "w", test::info_of({num_rows, 2048}));
    SaveOptions options;
    options.min_part_bytes = 4096 * test::draw(&random, 1, 20);
    const SavePlan plan = plan_of(world, options);
    REQUIRE(plan.total_bytes() == plan_of(world, {true, 1}).total_bytes());
    int64_t row = 0;
    for (const Part& part : plan.parts) {
      REQUIRE(part.first_row == row);
      REQUIRE(part.num_rows * 4096 >= options.min_part_bytes);
      row += part.num_rows;
    }
    if (!plan.parts.empty()) REQUIRE(row == num_rows);
  }
}

/// A transformer like LLaMA with AdamW's moments. `add` gives each tensor to the ranks.
template <class Add>
void add_llama(int64_t num_layers, int64_t width, int64_t hidden, int64_t vocabulary, Add&& add) {
  const auto add_all = [&](const std::string& name, const Dims& sizes) {
    add("model." + name, test::info_of(sizes));
    add("optimizer.exp_avg." + name, test::info_of(sizes, DType::kFloat32));
    add("optimizer.exp_avg_sq." + name, test::info_of(sizes, DType::kFloat32));
    add("optimizer.step." + name, test::info_of({}, DType::kFloat32));
  };
  add_all("embedding", {vocabulary, width});
  for (int64_t layer = 0; layer < num_layers; ++layer) {
    const std::string prefix = "layers." + std::to_string(layer) + ".";
    for (const char* name : {"wq", "wo"}) add_all(prefix + name, {width, width});
    for (const char* name : {"wk", "wv"}) add_all(prefix + name, {width / 4, width});
    for (const char* name : {"w1", "w3"}) add_all(prefix + name, {hidden, width});
    add_all(prefix + "w2", {width, hidden});
    for (const char* name : {"norm1", "norm2"}) add_all(prefix + name, {width});
  }
  add_all("norm", {width});
  add_all("output", {vocabulary, width});
}

test::Mesh mesh_of(Dims axes, std::vector<int64_t> placements) {
  test::Mesh mesh{{}, std::move(axes), std::move(placements)};
  const auto size = std::accumulate(mesh.axes.begin(), mesh.axes.end(), int64_t{1}, std::multiplies<int64_t>());
  for (uint32_t rank = 0; rank < size; ++rank) mesh.ranks.push_back(rank);
  return mesh;
}

TEST_CASE("save_plan: DDP is balanced within 2 percent") {
  for (const uint32_t num_ranks : {2u, 4u, 8u, 64u}) {
    for (const int64_t num_layers : {1, 4, 32}) {
      test::World world(num_ranks);
      add_llama(num_layers, 1024, 2816, 32000,
                [&](const std::string& fqn, const auto& info) { test::add_replicated(&world, fqn, info); });
      const SavePlan plan = plan_of(world);
      INFO(num_ranks, " ranks, ", num_layers, " layers: ", ratio(plan));
      CHECK(ratio(plan) <= 1.02);
      CHECK(plan.parts.size() <= 2 * num_ranks);  // one cut per rank
    }
  }
}

TEST_CASE("save_plan: HSDP is balanced within 2 percent") {
  for (const Dims& axes : {Dims{2, 2}, Dims{2, 4}, Dims{4, 2}, Dims{8, 3}}) {
    test::World world(static_cast<size_t>(axes[0] * axes[1]));
    add_llama(4, 1024, 2816, 32000, [&](const std::string& fqn, const tensor::TensorInfo& info) {
      if (info.sizes.empty()) {
        test::add_replicated(&world, fqn, info);
      } else {
        test::add_sharded(&world, fqn, info, mesh_of(axes, {-1, 0}));
      }
    });
    INFO(axes[0], " x ", axes[1], ": ", ratio(plan_of(world)));
    CHECK(ratio(plan_of(world)) <= 1.02);
  }
}

TEST_CASE("save_plan: skewed sizes are balanced within 2 percent") {
  for (const uint32_t num_ranks : {2u, 3u, 4u, 8u}) {
    test::World half(num_ranks);  // one tensor is half of all bytes
    for (int i = 0; i < 100; ++i) test::add_replicated(&half, "w" + std::to_string(i), test::info_of({1000, 1024}));
    test::add_replicated(&half, "big", test::info_of({100000, 1024}));
    CHECK(ratio(plan_of(half)) <= 1.02);
    test::World geometric(num_ranks);
    for (int i = 0; i < 20; ++i) {
      test::add_replicated(&geometric, "w" + std::to_string(i), test::info_of({int64_t{1} << (i + 6), 16}));
    }
    CHECK(ratio(plan_of(geometric)) <= 1.02);
    test::World fixed(num_ranks);  // tensors that cannot be split are assigned first, and splits make up for it
    test::add_replicated(&fixed, "a", test::info_of({5000, 1024}));
    test::add_replicated(&fixed, "b", test::info_of({5000, 1024}));
    test::add_replicated(&fixed, "fixed", test::info_of({10000 / num_ranks, 1024}), false);
    CHECK(ratio(plan_of(fixed)) <= 1.02);
    test::World stacked(num_ranks);  // few long rows
    for (int i = 0; i < 8; ++i) test::add_replicated(&stacked, "e" + std::to_string(i), test::info_of({12, 1 << 20}));
    CHECK(ratio(plan_of(stacked)) <= 1.02);
  }
}

TEST_CASE("save_plan: ranks that hold much alone are given less of what is shared") {
  test::World world(4);
  test::add_sharded(&world, "own", test::info_of({3000, 1024}), test::Mesh{{1}, {1}, {-1}});
  test::add_sharded(&world, "pair", test::info_of({2000, 1024}), test::Mesh{{2, 3}, {2}, {-1}});
  test::add_replicated(&world, "all", test::info_of({11000, 1024}));
  const SavePlan plan = plan_of(world);
  CHECK(ratio(plan) <= 1.02);
  CHECK(plan.writers[1] == 1);
  CHECK(plan.writers[2] == 2);  // smaller than every rank's share, so it need not be split
}

TEST_CASE("save_plan: many small tensors spread by number, not only by bytes") {
  test::World world(4);
  for (int i = 0; i < 4000; ++i) test::add_replicated(&world, "step" + std::to_string(i), test::info_of({}));
  std::vector<int> of_rank(4, 0);
  for (const uint32_t writer : plan_of(world).writers) ++of_rank.at(writer);
  CHECK(of_rank == std::vector<int>{1000, 1000, 1000, 1000});
}

TEST_CASE("save_plan: boxes without elements are written once, and never hide one that has some") {
  test::World world(3);
  const tensor::TensorInfo info = test::info_of({4});
  const auto give = [&](uint32_t rank, std::vector<Box> boxes) {
    world[rank].push_back({"w", EntryKind::kShard, "", info, true, std::move(boxes)});
  };
  give(0, {{{0}, {0}}, {{4}, {0}}});
  give(1, {{{0}, {4}}, {{4}, {0}}});
  give(2, {{{2}, {0}}});
  const Inventory inventory = test::merged(test::blobs_of(world));
  const SavePlan plan = test::value_of(plan_save(inventory, {}));
  const auto chunks = chunks_of(inventory, plan, inventory.entries[0]);
  REQUIRE(chunks.size() == 3);
  CHECK(chunks[0].rank == 0);
  CHECK(chunks[0].box == Box{{4}, {0}});
  CHECK(chunks[1].rank == 1);
  CHECK(chunks[1].box == Box{{0}, {4}});
  CHECK(chunks[2].rank == 2);
  CHECK(chunks[2].box == Box{{2}, {0}});
}

TEST_CASE("save_plan: a part never begins where a box without elements does") {
  test::World world(4);
  for (uint32_t rank = 0; rank < 4; ++rank) {
    std::vector<Box> boxes{tensor::whole({1024, 1024})};
    if (rank == 3) boxes.push_back({{256, 0}, {0, 1024}});
    world[rank].push_back({"w", EntryKind::kShard, "", test::info_of({1024, 1024}), true, boxes});
  }
  const Inventory inventory = test::merged(test::blobs_of(world));
  CHECK(chunks_of(inventory, test::value_of(plan_save(inventory, {})), inventory.entries[0]).size() == 2);
}

TEST_CASE("save_plan: refuses what is not of all ranks, not valid, or not a least part") {
  test::World world(3);
  test::add_replicated(&world, "w", test::info_of({4}));
  const std::vector<std::string> blobs = test::blobs_of(world);
  EXPECT_FAILURE(kInvalidArgument, "rank 1 is missing", plan_save(test::merged({blobs[0], blobs[2]}), {}));
  EXPECT_FAILURE(kInvalidArgument, "rank 0 is missing", plan_save(test::merged({blobs[2]}), {}));
  SaveOptions options;
  options.min_part_bytes = 0;
  EXPECT_CODE(kInvalidArgument, plan_save(test::merged(blobs), options));
  world[0].push_back({"s", EntryKind::kShard, "", test::info_of({4}), true, {{{0}, {3}}}});
  EXPECT_FAILURE(kInvalidArgument, "'s': rows 3 to 3 of 4 are in no chunk",
                 plan_save(test::merged(test::blobs_of(world)), {}));
}

}  // namespace
}  // namespace bytecheckpoint::planner
