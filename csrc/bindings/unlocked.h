// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <pybind11/pybind11.h>

#include <utility>

#include "csrc/bindings/errors.h"

namespace bytecheckpoint::bindings {

/// Runs `work` without the GIL and raises its Status.
template <class Work>
void run_unlocked(Work&& work) {
  base::Status outcome;
  {
    const pybind11::gil_scoped_release unlocked;
    outcome = work();
  }
  raise_if_error(outcome);
}

/// Runs `work` without the GIL and returns the value of its Result, or raises its Status.
template <class Work>
auto value_unlocked(Work&& work) {
  auto result = [&] {
    const pybind11::gil_scoped_release unlocked;
    return work();
  }();
  return value_or_raise(std::move(result));
}

}  // namespace bytecheckpoint::bindings
