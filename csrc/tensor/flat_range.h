// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <vector>

#include "csrc/base/status.h"
#include "csrc/tensor/box.h"

namespace bytecheckpoint::tensor {

/// Returns the boxes that together hold the elements [begin, end) of a row-major tensor of `sizes`, in the order of the
/// elements.
///
/// FSDP1 cuts flattened parameters at any element, so a shard is such a range. The elements of each box are neighbours
/// in the flat tensor, so the memory of the shard can be used without a copy. A tensor of 4 x 5, elements [3, 17):
///
///     . . . a a      a: row 0, columns 3 and 4: part of a row before the whole rows
///     b b b b b      b: rows 1 and 2: the whole rows
///     b b b b b
///     c c . . .      c: row 3, columns 0 and 1: part of a row behind them
///
/// There are at most 2 * ndim - 1 boxes: every dim but the last adds one before and one behind the whole rows. An empty
/// range has no box; the element of a scalar is one box.
/// Source: ByteCheckpoint (NSDI'25), decomposing irregular tensors.
///
/// \returns kInvalidArgument unless 0 <= begin <= end <= number of elements.
/// Pure; O(ndim^2).
base::Result<std::vector<Box>> boxes_of_flat_range(const Dims& sizes, int64_t begin, int64_t end);

}  // namespace bytecheckpoint::tensor
