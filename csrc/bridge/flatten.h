// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <pybind11/pybind11.h>

namespace bytecheckpoint::bridge {

/// What DCP's `flatten_state_dict` makes of nested dicts and lists.
struct FlatState {
  pybind11::dict values;    // FQN to value
  pybind11::dict mappings;  // FQN to the tuple of keys and positions that lead there
};

/// Flattens a state dict as DCP does. Every Mapping is entered; a list only if it holds a tensor or a Mapping, in it or
/// in lists below it. Raises ValueError if two paths have the same FQN. Needs the GIL.
FlatState flatten_state_dict(pybind11::handle state_dict);

}  // namespace bytecheckpoint::bridge
