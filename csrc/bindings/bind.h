// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <pybind11/pybind11.h>

namespace bytecheckpoint::bindings {

// What each `bind_*.cpp` adds to a module. `core_module.cpp` and `torch_module.cpp` call what belongs to theirs.

// Both modules.

/// Checkpoint.
void bind_checkpoint(pybind11::module_& m);
/// RowMajorReader: elements of tensors in row-major order, from whatever chunks have them.
void bind_row_major(pybind11::module_& m);
/// What lets the engine read and write objects of a store: `register_store` and UploadParts.
void bind_store(pybind11::module_& m);
/// ViewBuilder and ViewTensor: checkpoints under other names, with tensors made of stored ones.
void bind_view(pybind11::module_& m);

// `_core`, which needs no torch.

/// Archives of values of builtin and standard types: written and read, and those of others checked.
void bind_builtin(pybind11::module_& m);
/// `is_in_call`: whether a thread is still in one certain call of a function.
void bind_calls(pybind11::module_& m);
/// `copy_shard`, `written_files` and `assemble_copy`, which write a checkpoint from another one.
void bind_copy(pybind11::module_& m);
/// The export of tensors of a checkpoint into files of other formats.
void bind_export(pybind11::module_& m);
/// `inspect_folder`, and the removal of checkpoints.
void bind_steps(pybind11::module_& m);
/// `decode_trace`, and the names of phases. In bind_trace.cpp.
void bind_trace_summary(pybind11::module_& m);
/// The verification of a checkpoint.
void bind_verify(pybind11::module_& m);

// `_C`, which knows torch tensors.

/// Changes of tensors: found against copies, and applied.
void bind_changes(pybind11::module_& m);
/// Commit, `assemble_manifest`, and DCP's metadata of a checkpoint.
void bind_commit(pybind11::module_& m);
/// ReadPlan and LoadJob.
void bind_load(pybind11::module_& m);
/// SaveJob.
void bind_save(pybind11::module_& m);
/// LocalState, the plan of all ranks, and WritePlan.
void bind_save_plan(pybind11::module_& m);
/// SharedRun, and the messages that ranks exchange before it.
void bind_sharing(pybind11::module_& m);
/// The arena, staged states, and the merging of tensors.
void bind_staging(pybind11::module_& m);
/// Trace.
void bind_trace(pybind11::module_& m);

}  // namespace bytecheckpoint::bindings
