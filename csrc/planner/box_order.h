// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>
#include <cstdint>

namespace bytecheckpoint::planner {

// A box in a flat array has 2 * num_dims numbers: its offsets, then its sizes.
//
// Boxes of one tensor are ordered by the row-major position of their first element, then by their numbers. Shards of
// any mesh come almost in this order, and comparing one integer is enough for most pairs. The positions of boxes that
// lie outside their tensor may wrap around; the order is still a total one.

/// Returns the row-major position of the first element of `box` in a tensor of `tensor_sizes`.
inline uint64_t first_position(const int64_t* tensor_sizes, const int64_t* box, size_t num_dims) {
  uint64_t position = 0;
  for (size_t d = 0; d < num_dims; ++d) {
    position = position * static_cast<uint64_t>(tensor_sizes[d]) + static_cast<uint64_t>(box[d]);
  }
  return position;
}

/// Compares two boxes with equal first positions. \returns a number below, at or above 0.
inline int compare_boxes(const int64_t* a, const int64_t* b, size_t num_dims) {
  for (size_t i = 0; i < 2 * num_dims; ++i) {
    if (a[i] != b[i]) return a[i] < b[i] ? -1 : 1;
  }
  return 0;
}

}  // namespace bytecheckpoint::planner
