// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <functional>
#include <vector>

#include "csrc/tensor/box.h"

namespace bytecheckpoint::format {

/// Returns the offset in dim `dim` of chunk number `chunk` of an item.
using OffsetOf = std::function<int64_t(uint32_t chunk, size_t dim)>;

/// Finds the chunks of a tensor that overlap `box`, by binary search.
///
/// The result is right if the chunks are in ascending order of their offsets, and chunks that begin at the same offset
/// of a dim also end at the same offset. Shards of any mesh are like that. For other chunks the result is a guess,
/// which the caller must test.
///
/// Calls `offset_of` few times and for neighbouring chunks, because each call may cost a read. The first guess is where
/// the box would be if all shards had the same size.
/// \param sizes  Of the tensor.
/// \param box  Inside the tensor, with elements.
/// \param num_chunks  Number of all chunks of the tensor.
/// \returns the numbers of the chunks, ascending.
std::vector<uint32_t> search_overlapping(const tensor::Dims& sizes, const tensor::Box& box, uint32_t num_chunks,
                                         const OffsetOf& offset_of);

}  // namespace bytecheckpoint::format
