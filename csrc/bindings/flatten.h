// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <pybind11/pybind11.h>

namespace bytecheckpoint::bindings {

/// What DCP's `flatten_state_dict` makes of nested dicts and lists.
struct FlatState {
  pybind11::dict values;    // FQN to value
  pybind11::dict mappings;  // FQN to the keys and positions that lead there, as a tuple
};

/// Mappings are always entered; a list only if there is a tensor or a Mapping in it, at any depth of lists.
/// Raises ValueError if two paths have one name. Needs the GIL.
FlatState flatten_state_dict(pybind11::handle state_dict);

}  // namespace bytecheckpoint::bindings
