// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <string>
#include <vector>

#include "csrc/base/status.h"
#include "csrc/format/manifest.h"
#include "csrc/planner/inventory.h"
#include "csrc/planner/save_plan.h"

namespace bytecheckpoint::bindings {

/// Who writes what of a save, and what its metadata will say.
struct GlobalPlan {
  std::vector<std::string> answers;  // by rank
  std::vector<size_t> rank_items;    // that each writes
  std::vector<int64_t> rank_bytes;
  format::Manifest manifest;  // items with chunks and planner data; records, files and ids are not known yet
};

/// \param inventory   Of all ranks.
/// \param is_nested   The state dict was flattened: its planner data are the ways through nested dicts.
/// \returns kInvalidArgument if a rank is missing, or the ranks do not hold all of a tensor; kCorrupt for a damaged
/// way.
base::Result<GlobalPlan> plan_inventory(const planner::Inventory& inventory, const planner::SaveOptions& options,
                                        bool is_nested);

}  // namespace bytecheckpoint::bindings
