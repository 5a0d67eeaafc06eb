// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "csrc/base/status.h"
#include "csrc/planner/inventory.h"
#include "csrc/planner/save_plan.h"
#include "csrc/tensor/box.h"

namespace bytecheckpoint::planner {

/// A box, or a part of one, that a rank is to write.
struct PlannedWrite {
  uint32_t entry = 0;   // number of the entry in the rank's inventory
  uint32_t number = 0;  // number of the box in that entry of the inventory
  bool is_whole = true;
  tensor::Box box;  // the part of the tensor that is written; no dims for an object
};

/// Encodes the assignment of each rank: which of the boxes that it holds it is to write, and which rows of them.
///
/// A rank's boxes are numbered in the order of the names of their entries. So an assignment contains no names, and a
/// rank decodes it with its own inventory alone. Its size grows with what the rank writes, not with what it holds.
///
/// \param inventory  Of all ranks; `plan` was made for it.
/// \returns one assignment for each rank. Pure.
std::vector<std::string> encode_assignments(const Inventory& inventory, const SavePlan& plan);

/// Decodes an assignment into the writes of the rank, in the order of its state dict.
///
/// \param local  The inventory that this rank sent to the planner.
/// \param assignment  From another process; may be damaged.
/// \returns kInvalidArgument if `local` is of several ranks, or the assignment belongs to another inventory; kCorrupt
/// for damage. Pure.
base::Result<std::vector<PlannedWrite>> apply_assignment(const Inventory& local, std::string_view assignment);

}  // namespace bytecheckpoint::planner
