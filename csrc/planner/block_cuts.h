// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <vector>

#include "csrc/base/status.h"
#include "csrc/tensor/dims.h"

namespace bytecheckpoint::planner {

/// Where to cut a row-major tensor, instead of anywhere, so that each part is a block of whole rows of its first dim.
///
/// A cut moves to the nearest multiple of a group of rows, the lower one of two that are as near, and none moves by
/// more than half of one; so parts stay as balanced as they were, but for such a group. Parts may become empty: a
/// tensor that is smaller than a group goes whole to the part that has its middle.
///
/// \param cuts                Ascending, from 0 to the number of elements; part i is elements [cuts[i], cuts[i + 1]).
/// \param min_block_elements  Rows are taken together until they have so many, or are all. 1 at least.
/// \returns as many cuts; kInvalidArgument for cuts that are none of a tensor of `sizes`.
/// Pure; O(cuts).
/// Source: asynchronous tensor merging, which the abstract of ByteCheckpoint (NSDI'25) names; that cuts move, rather
/// than tensors, is ours.
base::Result<std::vector<int64_t>> block_cuts(const tensor::Dims& sizes, const std::vector<int64_t>& cuts,
                                              int64_t min_block_elements);

}  // namespace bytecheckpoint::planner
