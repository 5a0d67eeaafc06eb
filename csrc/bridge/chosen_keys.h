// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <pybind11/pybind11.h>

#include <vector>

#include "csrc/bridge/flatten.h"

namespace bytecheckpoint::bridge {

/// The values of a flat state that patterns choose, and which of the patterns match a key of it.
struct ChosenKeys {
  FlatState kept;
  std::vector<bool> is_used;  // for each pattern: those of `include`, then those of `exclude`
};

/// Chooses the keys that a pattern of `include` matches, or all if there is none, without those that a pattern of
/// `exclude` matches. Needs the GIL.
/// \param flat      FQN to value.
/// \param mappings  FQN to the path through nested dicts, or None.
/// \param include, exclude  Functions from a key to something that is None if the pattern does not match it.
ChosenKeys choose_keys(const pybind11::dict& flat, const pybind11::object& mappings, const pybind11::list& include,
                       const pybind11::list& exclude);

/// Returns a copy of the containers of `state`, with the values of `kept` in their places, and `stand_in` in the places
/// of the values that were not chosen.
/// \param flat  What `flatten_state_dict` makes of `state`.
/// \param kept  What `choose_keys` makes of `flat`; values may be others since.
pybind11::object with_kept(pybind11::handle state, const pybind11::dict& flat, const pybind11::dict& kept,
                           pybind11::object stand_in);

}  // namespace bytecheckpoint::bridge
