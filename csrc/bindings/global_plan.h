// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <string>
#include <vector>

#include "csrc/base/status.h"
#include "csrc/engine/coverage.h"
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
/// \param gaps        What a tensor is of which the ranks hold but parts.
/// \param is_nested   The state dict was flattened: its planner data are the ways through nested dicts.
/// \returns kInvalidArgument if a rank is missing, or the ranks do not hold all of a tensor and `gaps` refuses that;
/// kCorrupt for a damaged way.
base::Result<GlobalPlan> plan_inventory(const planner::Inventory& inventory, planner::SaveOptions options,
                                        bool is_nested, engine::Gaps gaps);

}  // namespace bytecheckpoint::bindings
