// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <pybind11/pybind11.h>

namespace bytecheckpoint::bindings {

/// Adds ViewBuilder and ViewTensor: checkpoints under other names, with tensors made of stored ones.
void bind_view(pybind11::module_& m);

}  // namespace bytecheckpoint::bindings
