// SPDX-License-Identifier: Apache-2.0
#include "csrc/planner/share_plan.h"

#include <algorithm>
#include <numeric>
#include <tuple>

#include "csrc/base/bytes.h"

namespace bytecheckpoint::planner {
namespace {

/// If enough is shared, each rank reads about so many units. This balances the ranks and lets all of them begin at
/// once.
constexpr int64_t kUnitsPerRank = 8;
/// A message has at least this many blocks, unless the same ranks want fewer neighbouring blocks.
constexpr int64_t kLeastBlocks = 4;

/// A position at which a rank begins or ceases to want blocks.
struct Edge {
  uint32_t file;
  int64_t position;
  uint32_t rank;
  bool begins;
};

/// Returns the stretches that the same ranks want, as units of any size without an owner.
std::vector<ShareUnit> find_stretches(const std::vector<std::vector<BlockRange>>& wanted_by_rank, RankSets* sets) {
  std::vector<Edge> edges;
  for (uint32_t rank = 0; rank < wanted_by_rank.size(); ++rank) {
    for (const BlockRange& range : wanted_by_rank[rank]) {
      edges.push_back({range.file, range.begin, rank, true});
      edges.push_back({range.file, range.end, rank, false});
    }
  }
  std::sort(edges.begin(), edges.end(), [](const Edge& a, const Edge& b) {
    return std::tie(a.file, a.position, a.rank) < std::tie(b.file, b.position, b.rank);
  });
  std::vector<ShareUnit> stretches;
  std::vector<uint32_t> active;  // ascending
  for (size_t e = 0; e < edges.size();) {
    const Edge& here = edges[e];
    for (; e < edges.size() && edges[e].file == here.file && edges[e].position == here.position; ++e) {
      const auto place = std::lower_bound(active.begin(), active.end(), edges[e].rank);
      if (edges[e].begins) {
        active.insert(place, edges[e].rank);
      } else {
        active.erase(place);
      }
    }
    if (active.empty()) continue;
    stretches.push_back({here.file, here.position, edges[e].position - here.position, 0, sets->intern(active)});
  }
  return stretches;
}

std::vector<ShareUnit> cut(const std::vector<ShareUnit>& stretches, const RankSets& sets, int64_t max_shared_bytes,
                           int64_t max_bytes) {
  std::vector<ShareUnit> units;
  for (const ShareUnit& stretch : stretches) {
    const int64_t most = sets.size(stretch.wanted_by) == 1 ? max_bytes : max_shared_bytes;
    for (int64_t done = 0; done < stretch.bytes; done += most) {
      ShareUnit unit = stretch;
      unit.offset += done;
      unit.bytes = std::min(most, stretch.bytes - done);
      units.push_back(unit);
    }
  }
  return units;
}

void choose_owners(SharePlan* plan) {
  std::vector<size_t> order(plan->units.size());
  std::iota(order.begin(), order.end(), size_t{0});
  // A stable sort: among units that equally many ranks want, the order of the files stays, so that neighbours go to
  // different ranks.
  std::stable_sort(order.begin(), order.end(), [&](size_t a, size_t b) {
    return plan->sets.size(plan->units[a].wanted_by) < plan->sets.size(plan->units[b].wanted_by);
  });
  for (const size_t u : order) {
    ShareUnit& unit = plan->units[u];
    unit.owner = plan->sets.lowest(unit.wanted_by);
    plan->sets.for_each(unit.wanted_by, [&](uint32_t rank) {
      const int64_t load = plan->rank_bytes[rank], least = plan->rank_bytes[unit.owner];
      if (load < least || (load == least && rank < unit.owner)) unit.owner = rank;
    });
    plan->rank_bytes[unit.owner] += unit.bytes;
  }
}

}  // namespace

SharePlan plan_share(const std::vector<std::vector<BlockRange>>& wanted_by_rank, int64_t block_bytes,
                     int64_t max_unit_bytes) {
  SharePlan plan;
  plan.rank_bytes.resize(wanted_by_rank.size());
  const std::vector<ShareUnit> stretches = find_stretches(wanted_by_rank, &plan.sets);
  int64_t bytes_shared = 0;
  for (const ShareUnit& stretch : stretches) {
    const uint32_t num_ranks = plan.sets.size(stretch.wanted_by);
    plan.bytes_distinct += stretch.bytes;
    plan.bytes_wanted += stretch.bytes * num_ranks;
    if (num_ranks > 1) bytes_shared += stretch.bytes;
  }
  const int64_t parts = kUnitsPerRank * std::max<int64_t>(1, static_cast<int64_t>(wanted_by_rank.size()));
  const int64_t even = base::align_up(bytes_shared / parts, block_bytes);
  const int64_t max_shared_bytes = std::min(std::max(even, kLeastBlocks * block_bytes), max_unit_bytes);
  plan.units = cut(stretches, plan.sets, max_shared_bytes, max_unit_bytes);
  choose_owners(&plan);
  return plan;
}

}  // namespace bytecheckpoint::planner
