// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <pybind11/pybind11.h>

namespace bytecheckpoint::bindings {

/// Binds `Checkpoint`.
void bind_checkpoint(pybind11::module_& m);

}  // namespace bytecheckpoint::bindings
