// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <utility>

#include "csrc/bridge/errors.h"
#include "csrc/bridge/gil.h"

namespace bytecheckpoint::bridge {

/// Runs `work` without the GIL, which the caller must have.
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

}  // namespace bytecheckpoint::bridge
