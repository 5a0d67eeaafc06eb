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
/// in lists below it.
///
/// A step of a path through a Mapping is the text of the key, whatever the key is. Raises InvalidPlanError for what a
/// checkpoint cannot tell apart: two paths with the same FQN, two keys of one Mapping with the same text; and for a key
/// whose text has an address or the elements of a tensor, which no load would find. Needs the GIL.
FlatState flatten_state_dict(pybind11::handle state_dict);

}  // namespace bytecheckpoint::bridge
