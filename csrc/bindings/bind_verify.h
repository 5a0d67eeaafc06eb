// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <pybind11/pybind11.h>

namespace bytecheckpoint::bindings {

/// Binds the verification of a checkpoint.
void bind_verify(pybind11::module_& m);

}  // namespace bytecheckpoint::bindings
