// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <vector>

#include "csrc/planner/rank_sets.h"
#include "csrc/planner/wanted_blocks.h"

namespace bytecheckpoint::planner {

/// A stretch of a file that one rank reads for all that want it: what travels as one message.
struct ShareUnit {
  uint32_t file = 0;
  int64_t offset = 0;  // both multiples of the block size
  int64_t bytes = 0;
  uint32_t owner = 0;          // who reads it; one of `wanted_by`
  RankSets::Id wanted_by = 0;  // in the plan's sets
};

/// Who reads what, of all that several ranks want.
struct SharePlan {
  std::vector<ShareUnit> units;  // ascending by file and offset: the order in which every rank meets its own
  RankSets sets;
  std::vector<int64_t> rank_bytes;  // that each rank reads
  int64_t bytes_wanted = 0;         // by all ranks; what two want counts twice
  int64_t bytes_distinct = 0;       // what is read: every wanted block once
};

/// Gives every wanted block to one of the ranks that want it, keeping the largest rank's byte count small.
///
/// What one rank alone wants it reads itself. The rest goes to the least loaded of those that want it, the most
/// constrained first; ties go to the lower rank, so every rank computes the same plan. Units are cut so small that each
/// rank has several of them: neighbours then have different owners, and all ranks read at the same time.
///
/// \param wanted_by_rank  Merged ranges of each rank; fewer than kMaxRanks.
/// \param max_unit_bytes  A multiple of block_bytes.
/// Pure; O(n log n) in ranges, times the ranks that want a range.
SharePlan plan_share(const std::vector<std::vector<BlockRange>>& wanted_by_rank, int64_t block_bytes,
                     int64_t max_unit_bytes);

}  // namespace bytecheckpoint::planner
