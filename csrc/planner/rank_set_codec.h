// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <vector>

#include "csrc/base/index_table.h"
#include "csrc/base/varint.h"
#include "csrc/planner/rank_sets.h"

namespace bytecheckpoint::planner {

// A set of ranks as bytes: the number of runs, then for each run: first (counted from behind the run before), count,
// and step if count > 1.

/// Fewest bytes that a set takes.
inline constexpr size_t kLeastSetBytes = 3;

void write_set(const RankSets& sets, RankSets::Id id, base::VarintWriter* out);

/// Reads a set, and adds it to `sets`. \returns false for damage.
bool read_set(base::VarintReader* reader, RankSets* sets, RankSets::Id* id);

/// Numbers sets in the order in which they are first asked for. Not thread-safe.
class SetNumbers {
 public:
  uint32_t number(RankSets::Id id);
  const std::vector<RankSets::Id>& ids() const { return ids_; }

 private:
  std::vector<RankSets::Id> ids_;
  base::IndexTable table_;
  RankSets::Id last_id_ = 0;
  uint32_t last_number_ = 0;
};

}  // namespace bytecheckpoint::planner
