// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <vector>

#include "csrc/base/status.h"
#include "csrc/tensor/box.h"

namespace bytecheckpoint::tensor {

/// The boxes of a row-major tensor of `sizes` that hold its elements [begin, end), in the order of the elements. Each
/// box lies in one run of them, so that a flat shard holds it as it is.
///
/// At most 2 * ndim - 1: of every dim but the last a part of a row before the whole rows and one behind them, and the
/// whole rows in between. None if the range is empty; a scalar is one box.
/// Source: ByteCheckpoint (NSDI'25), decomposing irregular tensors.
///
/// \returns kInvalidArgument unless 0 <= begin <= end <= number of elements.
/// Pure; O(ndim^2).
base::Result<std::vector<Box>> boxes_of_flat_range(const Dims& sizes, int64_t begin, int64_t end);

}  // namespace bytecheckpoint::tensor
