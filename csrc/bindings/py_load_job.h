// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <pybind11/pybind11.h>

#include <atomic>
#include <memory>
#include <optional>
#include <vector>

#include "csrc/bridge/read_plan.h"
#include "csrc/bridge/tensor_memories.h"
#include "csrc/engine/load/load_job.h"
#include "csrc/engine/load/tensor_place.h"

namespace bytecheckpoint::bindings {

/// A LoadJob, the plan that it carries out, and where each tensor of the plan is stored. Needs the GIL, except for the
/// job.
struct PyLoadJob {
  const bridge::ReadPlan& plan;
  engine::LoadJob job;
  std::vector<std::optional<engine::TensorPlace>> places;
  std::vector<pybind11::object> alive;  // keeps the tensors that the next run fills
  int64_t bytes_done_before = 0;        // bytes that earlier runs have read
  std::shared_ptr<std::atomic<int64_t>> bytes_done_now;
  bridge::TensorMemories memories;
  base::ReadOnlyMemory read_only;  // as it was when a target was first looked up in it

  /// Whether what was added is not all filled after a shared run: scales come first, codes in the next run.
  bool has_more() { return !job.destinations().is_empty(); }
  /// Ends a run: tells autograd which tensors were written to, and returns the figures of the run for Python.
  pybind11::dict finish(const engine::LoadStats& stats);
};

}  // namespace bytecheckpoint::bindings
