// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <vector>

#include "csrc/planner/rank_sets.h"
#include "csrc/planner/wanted_blocks.h"

namespace bytecheckpoint::planner {

/// A range of a file that one rank reads for all ranks that want it. It is sent as one message.
struct ShareUnit {
  uint32_t file = 0;
  int64_t offset = 0;  // a multiple of the block size, and so is `bytes`
  int64_t bytes = 0;
  uint32_t owner = 0;          // the rank that reads it; one of `wanted_by`
  RankSets::Id wanted_by = 0;  // the ranks that want it; an Id of the plan's `sets`
};

/// Which rank reads which blocks when several ranks load together.
struct SharePlan {
  std::vector<ShareUnit> units;  // ascending by file and offset; every rank handles its units in this order
  RankSets sets;
  std::vector<int64_t> rank_bytes;  // that each rank reads from storage
  int64_t bytes_wanted = 0;         // by all ranks; a block that two ranks want counts twice
  int64_t bytes_distinct = 0;       // that are read: each wanted block counts once
};

/// Assigns every wanted block to one of the ranks that want it, and keeps the largest rank's bytes small.
///
///     blocks        |    0    |    1    |    2    |    3    |
///     rank 0 wants  [-----------------------------]
///     rank 1 wants            [-----------------------------]
///     read by       [ rank 0  ][ the less loaded  ][ rank 1 ]
///
/// A block that only one rank wants is read by that rank. Each other unit goes to the least loaded of the ranks that
/// want it, units that the fewest ranks want first; ties go to the lower rank, so every rank computes the same plan.
/// Units are cut so small that each rank has several. Neighbouring units then have different owners, and all ranks read
/// at the same time.
///
/// \param wanted_by_rank  Merged ranges of each rank (see `WantedBlocks::merged`); fewer than kMaxRanks ranks.
/// \param block_bytes  Size of a block; a power of two.
/// \param max_unit_bytes  A multiple of block_bytes.
/// Pure; O(n log n) in ranges, times the number of ranks that want a range.
SharePlan plan_share(const std::vector<std::vector<BlockRange>>& wanted_by_rank, int64_t block_bytes,
                     int64_t max_unit_bytes);

}  // namespace bytecheckpoint::planner
