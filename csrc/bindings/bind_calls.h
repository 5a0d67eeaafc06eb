// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <pybind11/pybind11.h>

namespace bytecheckpoint::bindings {

/// Binds `is_in_call`: whether a thread is still in one certain call of a function.
void bind_calls(pybind11::module_& m);

}  // namespace bytecheckpoint::bindings
