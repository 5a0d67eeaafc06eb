// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <pybind11/pybind11.h>

namespace bytecheckpoint::bindings {

void bind_pickle(pybind11::module_& m);

}  // namespace bytecheckpoint::bindings
