// SPDX-License-Identifier: Apache-2.0
#include "csrc/planner/coverage.h"

#include <algorithm>
#include <map>

#include "csrc/engine/coverage.h"
#include "tests/cpp/expect.h"
#include "tests/cpp/random_manifest.h"

namespace bytecheckpoint::planner {
namespace {

using tensor::Box;
using tensor::Dims;

std::string gap_of(const std::vector<Box>& boxes, const Box& region, const Dims& sizes,
                   int64_t max_steps = int64_t{1} << 28) {
  BoxNumbers numbers;
  for (const Box& box : boxes) numbers.add(box);
  return find_gap(numbers.boxes(sizes.size()), region, sizes, max_steps);
}

std::string gap_of(const std::vector<Box>& boxes, const Dims& sizes) {
  return gap_of(boxes, tensor::whole(sizes), sizes);
}

std::optional<TilingFault> fault_of(const std::vector<Box>& boxes, const Dims& sizes) {
  BoxNumbers numbers;
  for (const Box& box : boxes) numbers.add(box);
  return find_tiling_fault(numbers.boxes(sizes.size()), sizes);
}

/// Returns how many boxes contain each element.
std::map<Dims, int> counts_of(const std::vector<Box>& boxes, const Dims& sizes) {
  std::map<Dims, int> counts;
  test::for_each_index(sizes, [&](const Dims& index) { counts[index] = 0; });
  for (const Box& box : boxes) {
    test::for_each_index(box.sizes, [&](Dims index) {
      for (size_t d = 0; d < index.size(); ++d) index[d] += box.offsets[d];
      ++counts[index];
    });
  }
  return counts;
}

bool has(const std::map<Dims, int>& counts, const Box& region, int low, int high) {
  return std::any_of(counts.begin(), counts.end(), [&](const auto& entry) {
    for (size_t d = 0; d < region.num_dims(); ++d) {
      const int64_t at = entry.first[d] - region.offsets[d];
      if (at < 0 || at >= region.sizes[d]) return false;
    }
    return entry.second >= low && entry.second <= high;
  });
}

/// Parses the box that a message names.
Box box_in(const std::string& said, const Dims& sizes) {
  Box box = tensor::whole(sizes);
  const auto number_behind = [&](size_t* at) {
    *at = said.find_first_of("0123456789", *at);
    const int64_t number = std::stoll(said.substr(*at));
    *at = said.find_first_not_of("0123456789", *at);
    return number;
  };
  size_t at = 0;
  if (said.find("rows ") == 0) {
    box.offsets[0] = number_behind(&at);
    box.sizes[0] = number_behind(&at) - box.offsets[0] + 1;
  } else if (!sizes.empty()) {
    for (int64_t& offset : box.offsets) offset = number_behind(&at);
    for (int64_t& size : box.sizes) size = number_behind(&at);
  }
  return box;
}

std::vector<Box> draw_boxes(test::Random* random, const Dims& sizes) {
  std::vector<Box> boxes;
  if (test::draw(random, 0, 3) != 0) boxes = test::draw_partition(random, sizes, 4);
  for (int64_t fewer = test::draw(random, 0, 2); fewer > 0 && !boxes.empty(); --fewer) {
    boxes.erase(boxes.begin() + test::draw(random, 0, static_cast<int64_t>(boxes.size()) - 1));
  }
  for (int64_t more = test::draw(random, 0, 3) == 0 ? test::draw(random, 1, 4) : 0; more > 0; --more) {
    boxes.push_back(test::draw_box(random, sizes));
  }
  if (test::draw(random, 0, 2) == 0) std::shuffle(boxes.begin(), boxes.end(), *random);
  return boxes;
}

TEST_CASE("coverage: gaps are found where there are any, and only there, among boxes that overlap, too") {
  test::Random random(20);
  int num_gaps = 0;
  for (int round = 0; round < 8000; ++round) {
    const Dims sizes = test::draw_sizes(&random, 4, 7);
    const std::vector<Box> boxes = draw_boxes(&random, sizes);
    const Box region = round % 2 == 0 ? tensor::whole(sizes) : test::draw_box(&random, sizes);
    const auto counts = counts_of(boxes, sizes);
    const std::string said = gap_of(boxes, region, sizes);
    INFO(said);
    REQUIRE(said.empty() != has(counts, region, 0, 0));
    if (said.empty()) continue;
    ++num_gaps;
    const Box gap = box_in(said, sizes);
    REQUIRE(tensor::is_inside(gap, sizes));
    REQUIRE_FALSE(has(counts, gap, 1, INT32_MAX));
    Box common;
    REQUIRE(tensor::intersect(gap, region, &common));
    REQUIRE(common == gap);
  }
  REQUIRE(num_gaps > 1000);
}

TEST_CASE("coverage: boxes tile a tensor if and only if each element is in one of them") {
  test::Random random(21);
  int num_tilings = 0;
  for (int round = 0; round < 8000; ++round) {
    const Dims sizes = test::draw_sizes(&random, 4, 7);
    const std::vector<Box> boxes = draw_boxes(&random, sizes);
    const auto counts = counts_of(boxes, sizes);
    const auto fault = fault_of(boxes, sizes);
    const Box whole = tensor::whole(sizes);
    const bool overlaps = has(counts, whole, 2, INT32_MAX);
    REQUIRE(fault.has_value() == (overlaps || has(counts, whole, 0, 0)));
    num_tilings += fault.has_value() ? 0 : 1;
    if (!fault.has_value()) continue;
    REQUIRE(fault->is_overlap() == overlaps);
    REQUIRE(fault->gap.empty() == overlaps);
    Box common;
    if (overlaps) REQUIRE(tensor::intersect(boxes[fault->overlap.first], boxes[fault->overlap.second], &common));
  }
  REQUIRE(num_tilings > 1000);
}

TEST_CASE("coverage: a gap is said in rows where it has whole ones, else as a box, as large as it is") {
  CHECK(gap_of({{{0, 0}, {128, 8}}}, {256, 8}) == "rows 128 to 255 of 256 are");
  CHECK(gap_of({}, {4}) == "rows 0 to 3 of 4 are");
  CHECK(gap_of({{{0}, {2}}, {{1}, {2}}}, {4}) == "rows 3 to 3 of 4 are");
  CHECK(gap_of({{{0, 0}, {2, 3}}, {{0, 3}, {2, 3}}}, {4, 6}) == "rows 2 to 3 of 4 are");
  CHECK(gap_of({{{0, 0}, {4, 3}}}, {4, 6}) == "the box at [0, 3] of [4, 3], in a tensor of [4, 6], is");
  CHECK(gap_of({{{0, 0}, {2, 6}}, {{2, 0}, {2, 5}}}, {4, 6}) ==
        "the box at [2, 5] of [2, 1], in a tensor of [4, 6], is");
  CHECK(gap_of({}, {}) == "its only element is");
  CHECK(gap_of({{{}, {}}}, {}).empty());
  CHECK(gap_of({}, {0, 3}).empty());
  // Gaps outside the region do not count.
  CHECK(gap_of({{{2}, {4}}}, {{3}, {2}}, {8}).empty());
  CHECK(gap_of({{{2}, {4}}}, {{3}, {4}}, {8}) == "rows 6 to 6 of 8 are");
}

TEST_CASE("coverage: shards along one dim are judged in one walk, those of others whatever their order") {
  std::vector<Box> rows;
  for (int64_t r = 0; r < 100000; ++r) rows.push_back({{r, 0}, {1, 4}});
  CHECK_FALSE(fault_of(rows, {100000, 4}).has_value());
  std::swap(rows[7], rows[99]);
  CHECK_FALSE(fault_of(rows, {100000, 4}).has_value());
  rows.erase(rows.begin() + 50000);
  REQUIRE(fault_of(rows, {100000, 4}).has_value());
  CHECK(fault_of(rows, {100000, 4})->gap == "rows 50000 to 50000 of 100000 are");
}

TEST_CASE("coverage: boxes that cannot be judged in so many steps count as a gap, and that is said") {
  // The strips cut the tensor into as many parts as rows times columns.
  std::vector<Box> strips;
  for (int64_t i = 0; i < 1000; ++i) {
    strips.push_back({{i, 0, 0}, {1, 1000, 500}});
    strips.push_back({{0, i, 500}, {1000, 1, 500}});
  }
  const Dims sizes = {1000, 1000, 1000};
  CHECK(gap_of(strips, tensor::whole(sizes), sizes).empty());
  CHECK(gap_of(strips, tensor::whole(sizes), sizes, 1000) ==
        "some elements (there are 2000 boxes, too many to find out which) are perhaps");
}

}  // namespace
}  // namespace bytecheckpoint::planner

namespace bytecheckpoint::engine {
namespace {

using format::Item;

Item item_of(const std::string& fqn, tensor::Dims sizes, const std::vector<tensor::Box>& boxes) {
  Item item;
  item.fqn = fqn;
  item.is_tensor = true;
  item.tensor.dtype = tensor::DType::kFloat32;
  item.tensor.sizes = std::move(sizes);
  for (const tensor::Box& box : boxes) item.chunks.push_back({box, {}});
  return item;
}

TEST_CASE("coverage: chunks of an item are judged, and a gap is what the save says") {
  CoverageCheck check;
  CHECK(check.fault(item_of("w", {4}, {{{0}, {2}}, {{2}, {2}}})).empty());
  CHECK(check.fault(item_of("w", {4}, {{{0}, {2}}})) == "'w': rows 2 to 3 of 4 are in no chunk");
  CHECK(check.fault(item_of("w", {4}, {{{0}, {3}}, {{2}, {2}}})) ==
        "'w': the chunk at [0] of [3] and the chunk at [2] of [2] overlap");
  Item bytes;
  bytes.fqn = "b";
  bytes.chunks.emplace_back();
  CHECK(check.fault(bytes).empty());

  Item half = item_of("w", {4}, {{{0}, {2}}});
  EXPECT_FAILURE(kInvalidArgument, "allow_partial_tensors=True", check.check(Gaps::kRefuse, &half));
  EXPECT_OK(check.check(Gaps::kIgnore, &half));
  CHECK_FALSE(half.is_partial);
  EXPECT_OK(check.check(Gaps::kMark, &half));
  CHECK(half.is_partial);
  EXPECT_OK(check.check(Gaps::kRefuse, &half));
  CHECK(check.fault(half).empty());
  Item whole = item_of("w", {4}, {{{0}, {4}}});
  EXPECT_OK(check.check(Gaps::kMark, &whole));
  CHECK_FALSE(whole.is_partial);
  Item twice = item_of("w", {4}, {{{0}, {3}}, {{2}, {2}}});
  EXPECT_FAILURE(kInvalidArgument, "overlap", check.check(Gaps::kMark, &twice));
  EXPECT_FAILURE(kInvalidArgument, "overlap", check.check(Gaps::kIgnore, &twice));
  Item outside = item_of("w", {4}, {{{3}, {2}}});
  EXPECT_FAILURE(kInvalidArgument, "outside its tensor", check.check(Gaps::kMark, &outside));
}

TEST_CASE("coverage: parts of ranks are judged together, by name and shape") {
  PartsCoverage parts;
  parts.add(item_of("whole", {4}, {{{0}, {4}}}));
  parts.add(item_of("whole", {4}, {{{0}, {4}}}));
  parts.add(item_of("shared", {4}, {{{0}, {2}}}));
  parts.add(item_of("shared", {4}, {{{0}, {2}}}));
  parts.add(item_of("shared", {4}, {{{2}, {2}}}));
  CHECK(parts.faults().empty());
  // Another shape makes it another tensor.
  parts.add(item_of("shared", {6}, {{{0}, {4}}}));
  parts.add(item_of("half", {4}, {{{2}, {2}}}));
  Item meant = item_of("meant", {4}, {{{2}, {2}}});
  meant.is_partial = true;
  parts.add(meant);
  const auto faults = parts.faults();
  REQUIRE(faults.size() == 2);
  CHECK(faults[0].first == "half");
  CHECK(faults[0].second == "'half': rows 0 to 1 of 4 are in no chunk of any part");
  CHECK(faults[1].second == "'shared': rows 4 to 5 of 6 are in no chunk of any part");
}

}  // namespace
}  // namespace bytecheckpoint::engine
