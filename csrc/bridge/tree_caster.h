// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <pybind11/pybind11.h>

#include <cstdint>
#include <optional>

#include "csrc/format/tree.h"

namespace bytecheckpoint::bridge {

/// Converts a value of Python's builtin types to a Tree, and back. Subclasses are refused, also tuples like torch.Size.
/// Raises TypeError, naming the type and its place in the value; ValueError for an int beyond 64 bits or too deep
/// nesting. Needs the GIL.
format::Tree tree_from_python(pybind11::handle value);
pybind11::object tree_to_python(const format::Tree& tree);

/// The same for a value that may be anything: returns nullopt instead of an error, and spends no time on the reason.
///
/// Also nullopt for a list or dict that is in several places, which would come back as several objects, and for a value
/// that may need more than `max_pickle_bytes` as a pickle. That limit also bounds time and memory for tuples within
/// tuples.
std::optional<format::Tree> try_tree_from_python(pybind11::handle value, int64_t max_pickle_bytes);

}  // namespace bytecheckpoint::bridge
