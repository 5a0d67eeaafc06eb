// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <pybind11/pybind11.h>

#include "csrc/format/tree.h"

namespace bytecheckpoint::bindings {

/// Python's builtin types (exactly those, no subclasses but torch.Size-like tuples are refused too) to a Tree and back.
/// Raises TypeError naming the type and where it stands, ValueError for an int beyond 64 bits or too deep a nesting.
format::Tree tree_from_python(pybind11::handle value);
pybind11::object tree_to_python(const format::Tree& tree);

}  // namespace bytecheckpoint::bindings
