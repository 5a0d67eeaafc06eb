// SPDX-License-Identifier: Apache-2.0
#include "csrc/planner/rank_sets.h"

#include <algorithm>
#include <map>
#include <set>

#include "tests/cpp/expect.h"
#include "tests/cpp/random_box.h"

namespace bytecheckpoint::planner {
namespace {

std::vector<uint32_t> ranks_of(const RankSets& sets, RankSets::Id id) {
  std::vector<uint32_t> ranks;
  sets.for_each(id, [&](uint32_t rank) { ranks.push_back(rank); });
  return ranks;
}

std::vector<RankRun> runs_of(const RankSets& sets, RankSets::Id id) {
  RankRun one;
  const RankRuns runs = sets.runs(id, &one);
  return {runs.begin(), runs.end()};
}

std::vector<uint32_t> draw_ranks(test::Random* random) {
  std::set<uint32_t> ranks;
  do {
    const auto first = static_cast<uint32_t>(test::draw(random, 0, 40));
    const auto step = static_cast<uint32_t>(test::draw(random, 1, 9));
    for (int64_t i = test::draw(random, 1, 12); i > 0; --i) ranks.insert(first + step * static_cast<uint32_t>(i));
  } while (test::draw(random, 0, 1) == 0);
  return {ranks.begin(), ranks.end()};
}

TEST_CASE("rank_sets: equal sets are one, different ones are not, and all come back") {
  test::Random random(3);
  RankSets sets;
  std::map<std::vector<uint32_t>, RankSets::Id> known;
  for (int round = 0; round < 3000; ++round) {
    const std::vector<uint32_t> ranks = draw_ranks(&random);
    const RankSets::Id id = sets.intern(ranks);
    const auto [found, is_new] = known.emplace(ranks, id);
    REQUIRE(found->second == id);
    REQUIRE(ranks_of(sets, id) == ranks);
    REQUIRE(sets.size(id) == ranks.size());
    REQUIRE(sets.lowest(id) == ranks.front());
    REQUIRE(sets.highest(id) == ranks.back());
    REQUIRE(RankSets::is_single(id) == (ranks.size() == 1));
    RankSets::Id again = 0;
    REQUIRE(sets.intern_runs(runs_of(sets, id), &again));
    REQUIRE(again == id);
  }
  std::set<RankSets::Id> ids;
  for (const auto& [ranks, id] : known) ids.insert(id);
  CHECK(ids.size() == known.size());
}

TEST_CASE("rank_sets: what meshes make is one run") {
  RankSets sets;
  std::vector<uint32_t> all(10000);
  for (uint32_t i = 0; i < all.size(); ++i) all[i] = i;
  CHECK(runs_of(sets, sets.intern(all)) == std::vector<RankRun>{{0, 1, 10000}});
  CHECK(runs_of(sets, sets.intern({5, 1255, 2505, 3755})) == std::vector<RankRun>{{5, 1250, 4}});
  CHECK(runs_of(sets, sets.intern({0, 1, 2, 8, 9, 10, 40})) == std::vector<RankRun>{{0, 1, 3}, {8, 1, 3}, {40, 0, 1}});
}

TEST_CASE("rank_sets: runs that are not the greedy ones, or name too high a rank, are refused") {
  RankSets sets;
  RankSets::Id id = 0;
  for (const std::vector<RankRun>& runs :
       std::vector<std::vector<RankRun>>{{},
                                         {{0, 0, 0}},
                                         {{0, 1, 1}},
                                         {{0, 0, 2}},
                                         {{0, 0, 1}, {4, 0, 1}},  // two single ranks are a run
                                         {{0, 2, 2}, {4, 0, 1}},  // 4 continues 0, 2
                                         {{0, 2, 3}, {3, 1, 2}},  // not ascending
                                         {{0, 1, 2}, {1, 2, 2}},  // a rank twice
                                         {{kMaxRanks, 0, 1}},
                                         {{0, kMaxRanks, 2}},
                                         {{1, 0xFFFFFFFF, 0xFFFFFFFF}}}) {
    CHECK_FALSE(sets.intern_runs(runs, &id));
  }
  CHECK(sets.intern_runs({{kMaxRanks - 1, 0, 1}}, &id));
}

TEST_CASE("rank_sets: the order is total, and knows nothing of numbers") {
  test::Random random(4);
  std::vector<std::vector<uint32_t>> lists;
  for (int i = 0; i < 60; ++i) lists.push_back(draw_ranks(&random));
  const auto sorted = [&](const std::vector<std::vector<uint32_t>>& interned) {
    RankSets sets;
    std::vector<RankSets::Id> ids;
    for (const auto& ranks : interned) ids.push_back(sets.intern(ranks));
    std::sort(ids.begin(), ids.end(), [&](auto a, auto b) { return sets.is_before(a, b); });
    std::vector<std::vector<uint32_t>> out;
    for (const RankSets::Id id : ids) out.push_back(ranks_of(sets, id));
    return out;
  };
  const auto once = sorted(lists);
  std::shuffle(lists.begin(), lists.end(), random);
  CHECK(sorted(lists) == once);
  CHECK(std::is_sorted(once.begin(), once.end(), [](const auto& a, const auto& b) { return a.size() < b.size(); }));
}

}  // namespace
}  // namespace bytecheckpoint::planner
