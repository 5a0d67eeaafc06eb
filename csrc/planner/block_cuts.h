// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <vector>

#include "csrc/base/status.h"
#include "csrc/tensor/dims.h"

namespace bytecheckpoint::planner {

/// Moves the cuts of a flat row-major tensor to row borders, so that each part is a block of whole rows of its first
/// dim.
///
/// A tensor of 3 x 4 that is cut for two ranks at element 6; the cut moves to element 4:
///
///     a a a a        a a a a
///     a a b b   ->   b b b b
///     b b b b        b b b b
///
/// Rows are taken together to groups of at least `min_block_elements`. Each cut moves to the nearest border of a group,
/// to the lower one if both are equally near. So no cut moves by more than half a group, and parts stay as balanced as
/// they were, up to one group. Parts may become empty: a tensor smaller than a group goes as a whole to the part that
/// has its middle.
///
/// \param cuts  Ascending, from 0 to the number of elements. Part i has the elements [cuts[i], cuts[i + 1]).
/// \param min_block_elements  Least size of a group, >= 1. A tensor that has fewer elements is one group.
/// \returns as many cuts as it got; kInvalidArgument if `cuts` are not cuts of a tensor of `sizes`.
/// Pure; O(number of cuts).
/// Source: asynchronous tensor merging, which the abstract of ByteCheckpoint (NSDI'25) names. Moving cuts instead of
/// sending tensors is our idea.
base::Result<std::vector<int64_t>> block_cuts(const tensor::Dims& sizes, const std::vector<int64_t>& cuts,
                                              int64_t min_block_elements);

}  // namespace bytecheckpoint::planner
