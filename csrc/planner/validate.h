// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "csrc/base/status.h"
#include "csrc/planner/inventory.h"

namespace bytecheckpoint::planner {

/// Do the boxes of every tensor lie in it, overlap nowhere, and cover it? The first fault found, kInvalidArgument, with
/// key, boxes and ranks.
///
/// Stock DCP's rules: the plan of a single rank need not cover its tensors, and boxes without elements are no fault
/// anywhere inside the bounds. Stricter: the same first element with other sizes is an overlap, where DCP writes one.
/// Pure; O(n log n) in boxes where a mesh has made them, or where they differ in two dims.
base::Status validate_inventory(const Inventory& inventory);

}  // namespace bytecheckpoint::planner
