// SPDX-License-Identifier: Apache-2.0
#include <pybind11/pybind11.h>

#include "csrc/bindings/bind.h"
#include "csrc/bindings/build_info.h"

PYBIND11_MODULE(_C, m) {
  m.doc() = "Save, load and commit of checkpoints; knows torch tensors.";
  m.def("build_info", &bytecheckpoint::bindings::build_info);
  bytecheckpoint::bindings::bind_checkpoint(m);
  bytecheckpoint::bindings::bind_view(m);
  bytecheckpoint::bindings::bind_row_major(m);
  bytecheckpoint::bindings::bind_save_plan(m);
  bytecheckpoint::bindings::bind_save(m);
  bytecheckpoint::bindings::bind_load(m);
  bytecheckpoint::bindings::bind_sharing(m);
  bytecheckpoint::bindings::bind_staging(m);
  bytecheckpoint::bindings::bind_changes(m);
  bytecheckpoint::bindings::bind_commit(m);
  bytecheckpoint::bindings::bind_store(m);
  bytecheckpoint::bindings::bind_trace(m);
}
