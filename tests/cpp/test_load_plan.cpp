// SPDX-License-Identifier: Apache-2.0
#include "csrc/planner/load_plan.h"

#include <algorithm>
#include <map>
#include <set>
#include <utility>

#include "tests/cpp/expect.h"
#include "tests/cpp/random_box.h"

namespace bytecheckpoint::planner {
namespace {

using tensor::Dims;

/// (file, block) -> boxes with a byte in it, found byte by byte.
std::map<std::pair<uint32_t, int64_t>, std::set<uint32_t>> wanted_blocks(const std::vector<WantedBox>& wanted,
                                                                         int64_t block_bytes) {
  std::map<std::pair<uint32_t, int64_t>, std::set<uint32_t>> blocks;
  for (uint32_t w = 0; w < wanted.size(); ++w) {
    test::for_each_index(wanted[w].sizes, [&](const Dims& index) {
      for (int64_t byte = 0; byte < wanted[w].itemsize_bytes; ++byte) {
        const int64_t position = wanted[w].offset + test::dot(index, wanted[w].strides_bytes) + byte;
        blocks[{wanted[w].file, position / block_bytes}].insert(w);
      }
    });
  }
  return blocks;
}

WantedBox box_of(uint32_t file, int64_t data_offset, const Dims& chunk_sizes, const tensor::Box& box,
                 int64_t itemsize_bytes) {
  return test::value_of(wanted_of_chunk(file, data_offset, chunk_sizes, box, itemsize_bytes));
}

/// `num_bytes` bytes in a row.
WantedBox bytes_at(uint32_t file, int64_t offset, int64_t num_bytes) {
  return box_of(file, offset, {num_bytes}, tensor::whole({num_bytes}), 1);
}

void check_plan(const std::vector<WantedBox>& wanted, int64_t block_bytes, int64_t max_segment_bytes) {
  const LoadPlan plan = plan_load(wanted, block_bytes, max_segment_bytes);
  auto expected = wanted_blocks(wanted, block_bytes);
  const auto num_blocks = static_cast<int64_t>(expected.size());
  int64_t bytes_read = 0;
  int64_t covered = 0;
  for (size_t s = 0; s < plan.segments.size(); ++s) {
    const ReadSegment& segment = plan.segments[s];
    if (s == 0 || plan.segments[s - 1].file != segment.file) {
      if (s != 0) REQUIRE(plan.segments[s - 1].file < segment.file);
      covered = -1;
    }
    REQUIRE(segment.offset % block_bytes == 0);
    REQUIRE(segment.bytes % block_bytes == 0);
    REQUIRE(segment.bytes > 0);
    REQUIRE(segment.bytes <= max_segment_bytes);
    REQUIRE(segment.offset >= covered);
    // Adjacent segments are joined up to the limit.
    if (segment.offset == covered) REQUIRE(plan.segments[s - 1].bytes == max_segment_bytes);
    covered = segment.offset + segment.bytes;
    bytes_read += segment.bytes;
    REQUIRE(std::is_sorted(segment.wanted.begin(), segment.wanted.end()));
    std::set<uint32_t> in_blocks;
    for (int64_t block = segment.offset / block_bytes; block < covered / block_bytes; ++block) {
      const auto found = expected.find({segment.file, block});
      REQUIRE(found != expected.end());  // no unwanted block, and none twice
      in_blocks.insert(found->second.begin(), found->second.end());
      expected.erase(found);
    }
    REQUIRE(std::includes(segment.wanted.begin(), segment.wanted.end(), in_blocks.begin(), in_blocks.end()));
    REQUIRE(std::set<uint32_t>(segment.wanted.begin(), segment.wanted.end()).size() == segment.wanted.size());
  }
  REQUIRE(expected.empty());
  REQUIRE(plan.bytes_read == bytes_read);
  REQUIRE(bytes_read == num_blocks * block_bytes);
  int64_t bytes_wanted = 0;
  for (const WantedBox& box : wanted) {
    int64_t numel = 0;
    REQUIRE(tensor::checked_numel(box.sizes, &numel));
    bytes_wanted += numel * box.itemsize_bytes;
  }
  REQUIRE(plan.bytes_wanted == bytes_wanted);
}

TEST_CASE("load_plan: reads every block that holds a wanted byte once, and no other") {
  test::Random random(15);
  for (int round = 0; round < 1500; ++round) {
    const int64_t block_bytes = int64_t{1} << test::draw(&random, 3, 9);
    std::vector<WantedBox> wanted(static_cast<size_t>(test::draw(&random, 0, 8)));
    for (WantedBox& box : wanted) {
      const auto file = static_cast<uint32_t>(test::draw(&random, 0, 2));
      const int64_t data_offset = test::draw(&random, 0, 40) * 16;
      const Dims chunk_sizes = test::draw_sizes(&random, 4, 9);
      const tensor::Box part = test::draw_box(&random, chunk_sizes);
      box = box_of(file, data_offset, chunk_sizes, part, int64_t{1} << test::draw(&random, 0, 4));
    }
    check_plan(wanted, block_bytes, block_bytes * test::draw(&random, 1, 6));
  }
}

TEST_CASE("load_plan: a segment names only boxes that its blocks serve, up to what one range spans") {
  // One box in block 0 and one in block 2 make two segments, each with its own box.
  const std::vector<WantedBox> wanted = {bytes_at(0, 0, 8), bytes_at(0, 32, 8)};
  const LoadPlan plan = plan_load(wanted, 16, 64);
  CHECK(plan.num_files() == 1);
  REQUIRE(plan.segments.size() == 2);
  CHECK(plan.segments[0].wanted == std::vector<uint32_t>{0});
  CHECK(plan.segments[1].wanted == std::vector<uint32_t>{1});
}

TEST_CASE("load_plan: a large record is cut at the limit, a column of it skips blocks") {
  const std::vector<WantedBox> whole = {bytes_at(0, 64, 1 << 20)};
  const LoadPlan plan = plan_load(whole, 4096, 1 << 18);
  CHECK(plan.segments.size() == 5);
  CHECK(plan.bytes_read == (1 << 20) + 4096);
  const std::vector<WantedBox> column = {box_of(0, 0, {100, 4096}, {{0, 0}, {100, 1}}, 4)};
  const LoadPlan narrow = plan_load(column, 4096, 1 << 18);
  CHECK(narrow.segments.size() == 100);
  CHECK(narrow.bytes_read == 100 * 4096);
  CHECK(narrow.bytes_wanted == 400);
}

TEST_CASE("load_plan: what is between wanted blocks is read up to a limit, and belongs to no box") {
  // Blocks of 16 bytes: box 0 in block 0, box 1 in block 2, box 2 in block 5, box 3 in another file.
  const std::vector<WantedBox> wanted = {bytes_at(0, 0, 8), bytes_at(0, 32, 8), bytes_at(0, 80, 8), bytes_at(1, 0, 8)};
  const LoadPlan plan = plan_load(wanted, 16, 64, 16);
  REQUIRE(plan.segments.size() == 3);
  CHECK(plan.segments[0].bytes == 48);
  CHECK(plan.segments[0].wanted == std::vector<uint32_t>{0, 1});
  CHECK(plan.segments[1].offset == 80);
  CHECK(plan.segments[2].file == 1);
  CHECK(plan.bytes_wanted == 32);
  CHECK(plan.bytes_read == 48 + 16 + 16);
  const LoadPlan cut = plan_load(wanted, 16, 32, 32);
  REQUIRE(cut.segments.size() == 4);
  CHECK(cut.segments[0].wanted == std::vector<uint32_t>{0});
  CHECK(cut.segments[1].wanted == std::vector<uint32_t>{1});
  CHECK(cut.segments[2].wanted == std::vector<uint32_t>{2});
  CHECK(cut.bytes_read == 96 + 16);
}

TEST_CASE("load_plan: nothing wanted, or only boxes without elements, is nothing to read") {
  CHECK(plan_load({}, 4096, 4096).segments.empty());
  const std::vector<WantedBox> empty = {box_of(0, 4096, {4, 0}, tensor::whole({4, 0}), 4),
                                        box_of(0, 4096, {4}, {{2}, {0}}, 4)};
  CHECK(plan_load(empty, 4096, 4096).segments.empty());
}

TEST_CASE("load_plan: a box outside its chunk is refused") {
  EXPECT_FAILURE(kInvalidArgument, "[3]", wanted_of_chunk(0, 0, {3}, {{1}, {3}}, 1));
  EXPECT_CODE(kInvalidArgument, wanted_of_chunk(0, 0, {3}, {{-1}, {1}}, 1));
  EXPECT_CODE(kInvalidArgument, wanted_of_chunk(0, 0, {3, 3}, {{0}, {1}}, 1));
}

}  // namespace
}  // namespace bytecheckpoint::planner
