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

/// \param blobs       What LocalState::blob gave on ranks 0, 1, ...
/// \param is_nested   The state dict was flattened: its planner data are the ways through nested dicts.
/// \returns kInvalidArgument if ranks disagree, or do not hold all of a tensor; kCorrupt for a damaged blob.
base::Result<GlobalPlan> plan_ranks(const std::vector<std::string_view>& blobs, const planner::SaveOptions& options,
                                    bool is_nested);

}  // namespace bytecheckpoint::bindings
