// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <utility>

#include "csrc/bindings/errors.h"
#include "csrc/bindings/gil.h"

namespace bytecheckpoint::bindings {

/// Runs `work` without the GIL.
template <class Work>
auto unlocked(Work&& work) {
  const WithoutGil no_gil;
  return work();
}

/// Runs `work` without the GIL and raises its Status.
template <class Work>
void run_unlocked(Work&& work) {
  raise_if_error(unlocked(std::forward<Work>(work)));
}

/// Runs `work` without the GIL and returns the value of its Result, or raises its Status.
template <class Work>
auto value_unlocked(Work&& work) {
  return value_or_raise(unlocked(std::forward<Work>(work)));
}

}  // namespace bytecheckpoint::bindings
