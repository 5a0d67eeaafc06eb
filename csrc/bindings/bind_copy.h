// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <pybind11/pybind11.h>

namespace bytecheckpoint::bindings {

/// Registers `copy_shard`, `written_files` and `assemble_copy`, which write a checkpoint from another one.
void bind_copy(pybind11::module_& m);

}  // namespace bytecheckpoint::bindings
