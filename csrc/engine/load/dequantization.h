// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "csrc/base/status.h"
#include "csrc/engine/load/checkpoint_view.h"
#include "csrc/engine/load/tensor_place.h"
#include "csrc/planner/wanted_blocks.h"
#include "csrc/staging/dequantize.h"
#include "csrc/tensor/strided_view.h"

namespace bytecheckpoint::engine {

/// Where the codes of a chunk of a view are, and the scales that belong to them. The chunk's `TensorPlace` has the
/// dtype of the values, the offset of its record's first code, and strides in codes.
struct PlacedCodes {
  std::shared_ptr<const Dequantization> how;
  planner::ViewedBox quantized;  // the box of the quantized tensor that the record has, as it is stored
  int64_t first = 0;             // number of the chunk's first code in the record
  std::shared_ptr<const std::vector<TensorPlace>> scales;  // of each of `how->scale_chunks`
};

/// Finds the places of the scales of all quantized chunks, and enters them. \returns as `locate_tensors`.
base::Status locate_scales(const std::string& directory, const format::Manifest& manifest,
                           const std::vector<ChunkInRecord>& chunks, std::vector<std::optional<TensorPlace>>* places);

/// Changes the place of a whole record to that of a quantized chunk of a view; `scales` are left out.
/// \returns kUnsupported for a record of another dtype, or of elements in an order that the chunk cannot be found in.
base::Status place_codes(const RecordView& view, const tensor::Dims& sizes, TensorPlace* place);

/// Returns the bytes of the codes of a box. Its dims are in the order of `WantedCodes`.
/// \param box  A part of the chunk; its offsets count from the chunk's first element.
planner::WantedBox wanted_codes_of(const format::Chunk& chunk, const TensorPlace& place, const tensor::Box& box);

/// Returns the box of the scales of all codes of a box: the smallest one, but where the box has codes from the end of
/// one row and the begin of the next.
tensor::Box scale_box_of(const TensorPlace& place, const tensor::Box& box);

/// Makes what fills `memory`, which is as large as `box`, with the values of its codes.
/// \param scale_box  From `scale_box_of`; `Dequantizer::scatter` gets its scales, row-major.
staging::Dequantizer dequantizer_of(const TensorPlace& place, const tensor::Box& box, const tensor::Box& scale_box,
                                    const tensor::StridedView& memory);

}  // namespace bytecheckpoint::engine
