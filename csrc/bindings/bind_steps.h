// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <pybind11/pybind11.h>

namespace bytecheckpoint::bindings {

/// What a checkpoint directory holds, and the right to remove it.
void bind_steps(pybind11::module_& m);

}  // namespace bytecheckpoint::bindings
