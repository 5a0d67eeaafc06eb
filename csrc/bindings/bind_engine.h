// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <pybind11/pybind11.h>

namespace bytecheckpoint::bindings {

/// Binds LocalState, the plan of all ranks, and WritePlan.
void bind_save_plan(pybind11::module_& m);
/// Binds SaveJob.
void bind_save(pybind11::module_& m);
/// Binds ReadPlan and LoadJob.
void bind_load(pybind11::module_& m);
/// Binds SharedRun, and the messages that ranks exchange before it.
void bind_sharing(pybind11::module_& m);
/// Binds the arena, staged states, and the merging of tensors.
void bind_staging(pybind11::module_& m);
/// Binds Commit, `assemble_manifest`, and DCP's metadata of a checkpoint.
void bind_commit(pybind11::module_& m);

}  // namespace bytecheckpoint::bindings
