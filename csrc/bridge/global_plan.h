// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <string>
#include <vector>

#include "csrc/base/status.h"
#include "csrc/engine/coverage.h"
#include "csrc/format/manifest/manifest.h"
#include "csrc/planner/inventory.h"
#include "csrc/planner/save_plan.h"

namespace bytecheckpoint::bridge {

/// Which rank writes what of a save, and what the metadata will say.
struct GlobalPlan {
  std::vector<std::string> assignments;  // by rank
  std::vector<size_t> rank_items;        // number of items that each rank writes
  std::vector<int64_t> rank_bytes;
  format::Manifest manifest;  // items with chunks and planner data; no records, files and ids yet
};

/// Makes the plan of a save. Needs no GIL.
/// \param inventory  The merged inventory of all ranks.
/// \param gaps       What to do about a tensor that the ranks hold only in part.
/// \param is_nested  The state dict was flattened: the planner data then are the paths through nested dicts.
/// \returns kInvalidArgument if a rank is missing, or if the ranks do not hold all of a tensor and `gaps` refuses that.
/// kCorrupt for a damaged path.
base::Result<GlobalPlan> plan_inventory(const planner::Inventory& inventory, planner::SaveOptions options,
                                        bool is_nested, engine::Gaps gaps);

}  // namespace bytecheckpoint::bridge
