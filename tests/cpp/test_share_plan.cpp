// SPDX-License-Identifier: Apache-2.0
#include "csrc/planner/share_plan.h"

#include <algorithm>
#include <map>
#include <numeric>
#include <set>
#include <utility>

#include "tests/cpp/expect.h"
#include "tests/cpp/random_box.h"

namespace bytecheckpoint::planner {
namespace {

constexpr int64_t kBlock = 16;

using Ranges = std::vector<std::vector<BlockRange>>;

/// (file, block) -> ranks that want it.
std::map<std::pair<uint32_t, int64_t>, std::set<uint32_t>> wanted_blocks(const Ranges& wanted) {
  std::map<std::pair<uint32_t, int64_t>, std::set<uint32_t>> blocks;
  for (uint32_t rank = 0; rank < wanted.size(); ++rank) {
    for (const BlockRange& range : wanted[rank]) {
      for (int64_t at = range.begin; at < range.end; at += kBlock) blocks[{range.file, at}].insert(rank);
    }
  }
  return blocks;
}

std::set<uint32_t> ranks_of(const SharePlan& plan, const ShareUnit& unit) {
  std::set<uint32_t> ranks;
  plan.sets.for_each(unit.wanted_by, [&](uint32_t rank) { ranks.insert(rank); });
  return ranks;
}

SharePlan check_plan(const Ranges& wanted, int64_t max_unit_bytes) {
  SharePlan plan = plan_share(wanted, kBlock, max_unit_bytes);
  auto expected = wanted_blocks(wanted);
  std::vector<int64_t> rank_bytes(wanted.size());
  int64_t bytes_wanted = 0, bytes_distinct = 0;
  for (size_t u = 0; u < plan.units.size(); ++u) {
    const ShareUnit& unit = plan.units[u];
    REQUIRE(unit.bytes > 0);
    REQUIRE(unit.bytes <= max_unit_bytes);
    REQUIRE(unit.offset % kBlock == 0);
    if (u != 0) {  // all ranks use one order
      const ShareUnit& before = plan.units[u - 1];
      REQUIRE(std::pair(before.file, before.offset + before.bytes) <= std::pair(unit.file, unit.offset));
    }
    const std::set<uint32_t> ranks = ranks_of(plan, unit);
    REQUIRE(ranks.count(unit.owner) == 1);
    for (int64_t at = unit.offset; at < unit.offset + unit.bytes; at += kBlock) {
      const auto found = expected.find({unit.file, at});
      REQUIRE(found != expected.end());  // no unwanted block, and none twice
      REQUIRE(found->second == ranks);
      expected.erase(found);
    }
    rank_bytes[unit.owner] += unit.bytes;
    bytes_distinct += unit.bytes;
    bytes_wanted += unit.bytes * static_cast<int64_t>(ranks.size());
  }
  REQUIRE(expected.empty());
  REQUIRE(plan.rank_bytes == rank_bytes);
  REQUIRE(plan.bytes_distinct == bytes_distinct);
  REQUIRE(plan.bytes_wanted == bytes_wanted);
  return plan;
}

Ranges draw_world(test::Random* random) {
  Ranges wanted(static_cast<size_t>(test::draw(random, 1, 9)));
  // Borders come from few places, so that ranges of different ranks coincide, touch and overlap.
  for (auto& ranges : wanted) {
    for (uint32_t file = 0; file < 3; ++file) {
      for (int64_t at = test::draw(random, 0, 4) * 5; at < 60; at += test::draw(random, 1, 4) * 5) {
        const int64_t end = at + test::draw(random, 1, 4) * 5;
        ranges.push_back({file, at * kBlock, end * kBlock});
        at = end;
      }
    }
  }
  return wanted;
}

TEST_CASE("share_plan: every wanted block has one owner, who wants it, whatever the world") {
  test::Random random(41);
  for (int round = 0; round < 800; ++round) {
    const Ranges wanted = draw_world(&random);
    const int64_t max_unit_bytes = kBlock * test::draw(&random, 1, 40);
    const SharePlan plan = check_plan(wanted, max_unit_bytes);
    // Units that all ranks want are assigned last. So a rank that got one had at most what the least loaded rank has
    // now.
    std::map<uint32_t, int64_t> last_bytes;
    for (const ShareUnit& unit : plan.units) {
      if (plan.sets.size(unit.wanted_by) == wanted.size()) last_bytes[unit.owner] = unit.bytes;
    }
    const int64_t least = *std::min_element(plan.rank_bytes.begin(), plan.rank_bytes.end());
    for (const auto& [rank, bytes] : last_bytes) CHECK(plan.rank_bytes[rank] - bytes <= least);
  }
}

TEST_CASE("share_plan: is the same for the same ranges") {
  test::Random random(42);
  for (int round = 0; round < 100; ++round) {
    const Ranges wanted = draw_world(&random);
    const SharePlan a = plan_share(wanted, kBlock, 8 * kBlock), b = plan_share(wanted, kBlock, 8 * kBlock);
    REQUIRE(a.units.size() == b.units.size());
    for (size_t u = 0; u < a.units.size(); ++u) {
      REQUIRE(a.units[u].owner == b.units[u].owner);
      REQUIRE(a.units[u].offset == b.units[u].offset);
    }
  }
}

TEST_CASE("share_plan: what all want is read by all in nearly equal parts, in turn") {
  for (const uint32_t num_ranks : {1u, 2u, 3u, 4u, 7u, 64u}) {
    const Ranges wanted(num_ranks, {{0, 3 * kBlock, 8003 * kBlock}, {1, 0, 5 * kBlock}});
    const SharePlan plan = check_plan(wanted, 100 * kBlock);
    const auto [least, most] = std::minmax_element(plan.rank_bytes.begin(), plan.rank_bytes.end());
    CHECK(*most - *least <= 100 * kBlock);
    CHECK(static_cast<double>(*most) * num_ranks <= 1.15 * static_cast<double>(plan.bytes_distinct));
    std::set<uint32_t> first;
    for (size_t u = 0; u < num_ranks; ++u) first.insert(plan.units[u].owner);
    CHECK(first.size() == num_ranks);  // all ranks start at once
  }
}

TEST_CASE("share_plan: little is shared by all, too, in messages that are not too small") {
  const SharePlan plan = check_plan(Ranges(4, {{0, 0, 16 * kBlock}}), 512 * kBlock);
  CHECK(plan.rank_bytes == std::vector<int64_t>(4, 4 * kBlock));
}

TEST_CASE("share_plan: who must read much alone reads less of what is shared") {
  Ranges wanted(3, {{0, 0, 90 * kBlock}});
  wanted[1].push_back({1, 0, 60 * kBlock});
  const SharePlan plan = check_plan(wanted, 10 * kBlock);
  const int64_t mean = 50 * kBlock;
  for (const int64_t bytes : plan.rank_bytes) CHECK(std::abs(bytes - mean) <= 10 * kBlock);
}

TEST_CASE("share_plan: shards of one replica each are read by their ranks, in whole segments") {
  Ranges wanted(4);
  for (uint32_t rank = 0; rank < 4; ++rank) wanted[rank] = {{rank, 0, 100 * kBlock}};
  const SharePlan plan = check_plan(wanted, 64 * kBlock);
  CHECK(plan.units.size() == 8);
  CHECK(plan.bytes_wanted == plan.bytes_distinct);
}

TEST_CASE("share_plan: nothing wanted is no unit") {
  CHECK(check_plan(Ranges(3), 64 * kBlock).units.empty());
  CHECK(check_plan(Ranges(), 64 * kBlock).units.empty());
}

}  // namespace
}  // namespace bytecheckpoint::planner
