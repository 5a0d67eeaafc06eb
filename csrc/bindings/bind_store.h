// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <pybind11/pybind11.h>

namespace bytecheckpoint::bindings {

/// Binds what lets the engine read and write objects of a store: `register_store` and `UploadParts`.
void bind_store(pybind11::module_& m);

}  // namespace bytecheckpoint::bindings
