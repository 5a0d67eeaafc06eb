// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <functional>
#include <vector>

#include "csrc/tensor/box.h"

namespace bytecheckpoint::format {

/// Offset in dim `dim` of chunk `chunk` of an item.
using OffsetOf = std::function<int64_t(uint32_t chunk, size_t dim)>;

/// Numbers of the chunks that overlap `box`, ascending, if chunks stand in ascending order of their offsets and those
/// that begin at one place in a dim also end at one: shards of any mesh do. For others it is a guess, to be tested.
///
/// Asks for few offsets that stand close together, since each may cost a read: at first where the box would be among
/// shards of equal size.
/// \param sizes       Of the tensor.
/// \param box         Inside it, with elements.
/// \param num_chunks  Of the tensor.
std::vector<uint32_t> search_overlapping(const tensor::Dims& sizes, const tensor::Box& box, uint32_t num_chunks,
                                         const OffsetOf& offset_of);

}  // namespace bytecheckpoint::format
