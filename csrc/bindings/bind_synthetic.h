// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <pybind11/pybind11.h>

namespace bytecheckpoint::bindings {

/// `SyntheticMetadata`: the coordinator's work and a loading rank's, at any scale. For benchmarks/metadata.py alone.
void bind_synthetic(pybind11::module_& m);

}  // namespace bytecheckpoint::bindings
