// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>
#include <cstdint>
#include <utility>
#include <vector>

namespace bytecheckpoint::planner {

/// Two of the boxes that have a common element; equal numbers if there are none. All must lie in one tensor.
///
/// Shards of a mesh form layers along each dim they are cut in, and are told apart layer by layer; whatever else there
/// is gets swept. O(n log n), but where boxes that no mesh has made differ in three dims and more.
///
/// \param boxes  Offsets, then sizes, of each: 2 * num_dims numbers, wherever they lie.
std::pair<size_t, size_t> find_overlap(const std::vector<const int64_t*>& boxes, size_t num_dims);

}  // namespace bytecheckpoint::planner
