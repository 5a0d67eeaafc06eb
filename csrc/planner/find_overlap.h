// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>
#include <cstdint>
#include <utility>
#include <vector>

namespace bytecheckpoint::planner {

/// Finds two boxes that have an element in common.
///
/// Shards of a mesh form layers along each dim in which they are cut: groups of boxes with the same interval, one group
/// behind the other. The search compares only boxes of the same layer. Boxes that are not layered are swept along one
/// dim.
///
/// \param boxes  All inside one tensor; offsets, then sizes, of each: 2 * num_dims numbers.
/// \returns the numbers of two such boxes, or two equal numbers if no boxes overlap.
/// Pure. O(n log n), except for boxes of no mesh that differ in three or more dims.
std::pair<size_t, size_t> find_overlap(const std::vector<const int64_t*>& boxes, size_t num_dims);

}  // namespace bytecheckpoint::planner
