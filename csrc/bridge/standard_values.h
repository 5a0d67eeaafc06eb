// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <pybind11/pybind11.h>

#include <optional>
#include <string_view>

#include "csrc/format/torch/standard_pickle.h"

namespace bytecheckpoint::bridge {

/// Makes the value that torch.load would make of an archive that `read_standard_archive` accepts, with references and
/// cycles. Each object is made by the one constructor of its type; nothing in the pickle is imported or called. Needs
/// the GIL.
///
/// \param bytes  Of the archive.
/// \returns nullopt if a constructor refuses its arguments, if numpy or torch is missing, or if a value contains itself
/// whose type cannot. Raises errors that are not about the value: MemoryError, KeyboardInterrupt, and RuntimeError if
/// the device of a tensor is not there.
std::optional<pybind11::object> standard_to_python(const format::StandardArchive& archive, std::string_view bytes);

}  // namespace bytecheckpoint::bridge
