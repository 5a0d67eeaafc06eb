// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <pybind11/pybind11.h>

#include <optional>

#include "csrc/format/pickle_values.h"

namespace bytecheckpoint::bindings {

/// What Python's own unpickler would make of a pickle that `check_standard` lets in, references and cycles included.
/// Each object comes from the one constructor of its type; nothing of the pickle is imported or called.
///
/// \returns nullopt if a constructor refuses its arguments, numpy or torch is not there, or something that cannot hold
///   itself does. Raises what is not about the value: MemoryError, KeyboardInterrupt.
std::optional<pybind11::object> standard_to_python(const format::Pickle& pickle);

}  // namespace bytecheckpoint::bindings
