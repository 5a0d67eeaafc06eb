// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <pybind11/pybind11.h>

#include "csrc/tensor/dims.h"

namespace bytecheckpoint::bridge {

/// Whether a tensor says of which boxes of a larger tensor it is made. Such a tensor is plain, and has the attributes
/// of torch.distributed.checkpoint.CheckpointableTensor. That exists since torch 2.15; with an older torch no tensor is
/// marked.
bool is_marked_as_parts(pybind11::handle tensor);

/// Returns the shape of the larger tensor.
tensor::Dims global_shape_of_parts(pybind11::handle tensor);

/// Returns the view of box number `box`.
pybind11::object part_of(pybind11::handle tensor, size_t box);

/// Gives `copy` the attributes that mark a tensor as parts.
void copy_marks(pybind11::handle marked, pybind11::handle copy);

}  // namespace bytecheckpoint::bridge
