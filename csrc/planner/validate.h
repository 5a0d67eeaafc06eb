// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "csrc/base/status.h"
#include "csrc/planner/inventory.h"

namespace bytecheckpoint::planner {

/// Checks that the boxes of every tensor lie in it, do not overlap, and cover it.
///
/// As in stock DCP, boxes without elements are allowed anywhere within the bounds. Two rules are stricter: the plan of
/// a single rank must cover its tensors, too; and two boxes that begin at the same element with different sizes are an
/// overlap, where DCP writes only one of them.
/// \param allow_gaps  If true, boxes need not cover their tensor.
/// \returns kInvalidArgument for the first fault found; the message names key, boxes and ranks.
/// Pure; O(n log n) in boxes of a mesh, and in boxes that differ in two dims at most.
base::Status validate_inventory(const Inventory& inventory, bool allow_gaps = false);

}  // namespace bytecheckpoint::planner
