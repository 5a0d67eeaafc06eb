// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <pybind11/pybind11.h>

namespace bytecheckpoint::bindings {

/// LocalState, the plan of all ranks and WritePlan.
void bind_save_plan(pybind11::module_& m);
/// SaveJob.
void bind_save(pybind11::module_& m);
/// ReadPlan and LoadJob.
void bind_load(pybind11::module_& m);
/// SharedRun, and what ranks tell one another before it.
void bind_sharing(pybind11::module_& m);
/// The arena, staged states, and merging of tensors.
void bind_staging(pybind11::module_& m);
/// Commit, the joining of what was planned with what was written, and DCP's metadata of a checkpoint.
void bind_commit(pybind11::module_& m);

}  // namespace bytecheckpoint::bindings
