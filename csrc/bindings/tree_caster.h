// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <pybind11/pybind11.h>

#include <cstdint>
#include <optional>

#include "csrc/format/tree.h"

namespace bytecheckpoint::bindings {

/// Python's builtin types (exactly those, no subclasses but torch.Size-like tuples are refused too) to a Tree and back.
/// Raises TypeError naming the type and where it stands, ValueError for an int beyond 64 bits or too deep a nesting.
format::Tree tree_from_python(pybind11::handle value);
pybind11::object tree_to_python(const format::Tree& tree);

/// The same for a value that may be anything: nullopt instead of an error, and no time spent on a reason.
///
/// Also nullopt for a list or dict that stands in several places, which would come back as several, and for what may
/// take more than `max_pickle_bytes` in a pickle; that bounds time and memory for tuples within tuples, too.
std::optional<format::Tree> try_tree_from_python(pybind11::handle value, int64_t max_pickle_bytes);

}  // namespace bytecheckpoint::bindings
