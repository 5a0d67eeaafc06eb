// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <pybind11/pybind11.h>

#include <string>

#include "csrc/engine/coverage.h"

namespace bytecheckpoint::bridge {

/// Converts Python's name of a `Gaps`. Raises ValueError for any other name.
inline engine::Gaps gaps_of(const std::string& name) {
  if (name == "refuse") return engine::Gaps::kRefuse;
  if (name == "mark") return engine::Gaps::kMark;
  if (name == "ignore") return engine::Gaps::kIgnore;
  throw pybind11::value_error("gaps '" + name + "': must be refuse, mark or ignore");
}

}  // namespace bytecheckpoint::bridge
