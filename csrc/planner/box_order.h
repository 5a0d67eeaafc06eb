// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>
#include <cstdint>

namespace bytecheckpoint::planner {

// Boxes lie in flat arrays: the offsets of one, then its sizes, 2 * num_dims numbers. Their order is by the row-major
// position of the first element, then by those numbers: shards of any mesh come almost sorted, and one integer compare
// tells most of them apart. Positions of boxes that lie outside may wrap around; the order stays a total one.

/// Row-major position of the first element.
inline uint64_t first_position(const int64_t* tensor_sizes, const int64_t* box, size_t num_dims) {
  uint64_t position = 0;
  for (size_t d = 0; d < num_dims; ++d) {
    position = position * static_cast<uint64_t>(tensor_sizes[d]) + static_cast<uint64_t>(box[d]);
  }
  return position;
}

/// Below, at or above 0, for boxes with equal first positions.
inline int compare_boxes(const int64_t* a, const int64_t* b, size_t num_dims) {
  for (size_t i = 0; i < 2 * num_dims; ++i) {
    if (a[i] != b[i]) return a[i] < b[i] ? -1 : 1;
  }
  return 0;
}

}  // namespace bytecheckpoint::planner
