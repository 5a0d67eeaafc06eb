// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "csrc/base/status.h"
#include "csrc/planner/inventory.h"

namespace bytecheckpoint::planner {

/// Do the boxes of every tensor lie in it, overlap nowhere, and cover it? The first fault found, kInvalidArgument, with
/// key, boxes and ranks.
///
/// As in stock DCP, boxes without elements are no fault anywhere inside the bounds. Stricter: the plan of a single rank
/// must cover its tensors, too, and the same first element with other sizes is an overlap, where DCP writes one.
/// \param allow_gaps  Boxes need not cover their tensor.
/// Pure; O(n log n) in boxes where a mesh has made them, or where they differ in two dims.
base::Status validate_inventory(const Inventory& inventory, bool allow_gaps = false);

}  // namespace bytecheckpoint::planner
