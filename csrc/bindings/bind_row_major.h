// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <pybind11/pybind11.h>

namespace bytecheckpoint::bindings {

/// Adds RowMajorReader: elements of tensors in row-major order, from whatever chunks have them.
void bind_row_major(pybind11::module_& m);

}  // namespace bytecheckpoint::bindings
