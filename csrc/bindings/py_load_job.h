// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <pybind11/pybind11.h>

#include <atomic>
#include <memory>
#include <optional>
#include <vector>

#include "csrc/bindings/read_plan.h"
#include "csrc/engine/load_job.h"
#include "csrc/engine/tensor_place.h"

namespace bytecheckpoint::bindings {

/// A LoadJob, the plan that it carries out, and where each tensor of the plan is stored.
struct PyLoadJob {
  const ReadPlan& plan;
  engine::LoadJob job;
  std::vector<std::optional<engine::TensorPlace>> places;
  std::vector<pybind11::object> alive;  // tensors that the next run fills
  int64_t bytes_done_before = 0;        // by the runs that have ended
  std::shared_ptr<std::atomic<int64_t>> bytes_done_now;

  /// After a run: tells autograd what was filled, and Python what was done.
  pybind11::dict finish(const engine::LoadStats& stats);
};

}  // namespace bytecheckpoint::bindings
