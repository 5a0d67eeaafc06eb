// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "csrc/engine/load/tensor_place.h"
#include "csrc/format/manifest/manifest.h"
#include "csrc/planner/load_plan.h"
#include "csrc/tensor/box.h"
#include "csrc/tensor/dims.h"

namespace bytecheckpoint::engine {

/// Describes a box of a chunk for the planner.
///
/// \param place  The chunk's, from `locate_tensors`.
/// \param box    A part of the chunk; its offsets count from the chunk's first element.
planner::WantedBox wanted_of(const format::Chunk& chunk, const TensorPlace& place, const tensor::Box& box);
/// The same for all bytes of a record.
planner::WantedBox wanted_of(const format::Record& record);

/// Returns sizes or strides, one for each dim of a chunk, in the order in which the chunk's dims are stored, outermost
/// first. `wanted_of` has them in this order.
tensor::Dims in_stored_order(const TensorPlace& place, const tensor::Dims& dims);

/// Whether a segment may end inside an element, because other writers' archives may begin anywhere. Then the bytes of
/// an element are treated as one more dim.
bool cuts_elements(const TensorPlace& place);

}  // namespace bytecheckpoint::engine
