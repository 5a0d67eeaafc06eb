// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <pybind11/pybind11.h>

namespace bytecheckpoint::bindings {

/// Binds `inspect_folder`, and the removal of checkpoints.
void bind_steps(pybind11::module_& m);

}  // namespace bytecheckpoint::bindings
