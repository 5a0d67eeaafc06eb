// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <pybind11/pybind11.h>

namespace bytecheckpoint::bindings {

/// Inventories of ranks, and the plan of a save that is made from them.
void bind_planning(pybind11::module_& m);

}  // namespace bytecheckpoint::bindings
