// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <pybind11/pybind11.h>

namespace bytecheckpoint::bindings {

/// SaveJob, LoadJob and Commit.
void bind_engine(pybind11::module_& m);

}  // namespace bytecheckpoint::bindings
