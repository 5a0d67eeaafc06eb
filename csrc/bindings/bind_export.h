// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <pybind11/pybind11.h>

namespace bytecheckpoint::bindings {

/// Adds the export of tensors of a checkpoint into files of other formats.
void bind_export(pybind11::module_& m);

}  // namespace bytecheckpoint::bindings
