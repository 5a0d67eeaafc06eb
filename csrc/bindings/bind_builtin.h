// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <pybind11/pybind11.h>

namespace bytecheckpoint::bindings {

/// Binds functions that write and read archives of values of builtin and standard types, and that check others.
void bind_builtin(pybind11::module_& m);

}  // namespace bytecheckpoint::bindings
