// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <pybind11/pybind11.h>

namespace bytecheckpoint::bindings {

/// Binds Trace.
void bind_trace(pybind11::module_& m);
/// Binds `decode_trace`, and the names of phases.
void bind_trace_summary(pybind11::module_& m);

}  // namespace bytecheckpoint::bindings
