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

/// One box, or a part of one, that a rank writes.
struct PlannedWrite {
  uint32_t entry = 0;   // number in the rank's inventory
  uint32_t number = 0;  // of the box that the rank holds, in its entry
  bool is_whole = true;
  tensor::Box box;  // what of the tensor is written; no dims for an object
};

/// What each rank is told: of the boxes it holds, which it writes, and which rows of them. A rank's boxes are numbered
/// by the names of their entries, so that the answer names nothing and needs nothing but the rank's own inventory.
/// Grows with what a rank writes, not with what it holds.
std::vector<std::string> encode_answers(const Inventory& inventory, const SavePlan& plan);

/// What the answer tells the rank of `local`, in the order of its state dict.
///
/// \param local  The inventory that the rank handed in.
/// \returns kInvalidArgument for an inventory of several ranks or an answer to another inventory, kCorrupt for damage.
base::Result<std::vector<PlannedWrite>> apply_answer(const Inventory& local, std::string_view answer);

}  // namespace bytecheckpoint::planner
