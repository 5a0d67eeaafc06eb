// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <pybind11/pybind11.h>

#include "csrc/tensor/dims.h"

namespace bytecheckpoint::bindings {

/// Does the value say of which boxes of a larger tensor it is made? It is a plain tensor, and has the attributes of
/// torch.distributed.checkpoint.CheckpointableTensor: torch 2.15 has that, and before it nothing is marked.
bool is_marked_as_parts(pybind11::handle tensor);

/// Shape of the larger tensor.
tensor::Dims global_shape_of_parts(pybind11::handle tensor);

/// The view of the box of that number.
pybind11::object part_of(pybind11::handle tensor, size_t box);

/// Gives `copy` the attributes that mark a tensor as parts.
void copy_marks(pybind11::handle marked, pybind11::handle copy);

}  // namespace bytecheckpoint::bindings
