// SPDX-License-Identifier: Apache-2.0
#include "csrc/bridge/chosen_keys.h"

#include "csrc/bridge/gil_yield.h"
#include "csrc/bridge/tree_copy.h"

namespace bytecheckpoint::bridge {
namespace {

namespace py = pybind11;

bool matches_key(py::handle pattern, py::handle key) {
  const auto found = py::reinterpret_steal<py::object>(PyObject_CallOneArg(pattern.ptr(), key.ptr()));
  if (!found) throw py::error_already_set();
  return !found.is_none();
}

/// Whether one of the patterns from number `first` on matches the key. All are tried until each has matched some key,
/// so that `is_used` is right.
bool any_matches(const py::list& patterns, size_t first, py::handle key, std::vector<bool>* is_used) {
  bool is_match = false;
  for (size_t i = 0; i < patterns.size(); ++i) {
    if (is_match && (*is_used)[first + i]) continue;
    if (!matches_key(patterns[i], key)) continue;
    is_match = (*is_used)[first + i] = true;
  }
  return is_match;
}

}  // namespace

ChosenKeys choose_keys(const py::dict& flat, const py::object& mappings, const py::list& include,
                       const py::list& exclude) {
  ChosenKeys chosen;
  chosen.is_used.resize(include.size() + exclude.size());
  GilYield gil_yield;
  for (const auto& [key, value] : flat) {
    gil_yield.take();
    const bool is_included = any_matches(include, 0, key, &chosen.is_used) || include.empty();
    const bool is_excluded = any_matches(exclude, include.size(), key, &chosen.is_used);
    if (!is_included || is_excluded) continue;
    chosen.kept.values[key] = value;
    if (!mappings.is_none()) chosen.kept.mappings[key] = mappings[key];
  }
  return chosen;
}

py::object with_kept(py::handle state, const py::dict& flat, const py::dict& kept, py::object stand_in) {
  GilYield gil_yield;
  const TreeCopier* copying = nullptr;
  const auto leaf = [&](py::handle value) -> py::object {
    gil_yield.take();
    const py::str name(copying->path());
    PyObject* const of_flat = PyDict_GetItemWithError(flat.ptr(), name.ptr());
    if (of_flat == nullptr && PyErr_Occurred() != nullptr) throw py::error_already_set();
    if (of_flat != value.ptr()) return py::reinterpret_borrow<py::object>(value);
    PyObject* const of_kept = PyDict_GetItemWithError(kept.ptr(), name.ptr());
    if (of_kept == nullptr && PyErr_Occurred() != nullptr) throw py::error_already_set();
    return of_kept == nullptr ? stand_in : py::reinterpret_borrow<py::object>(of_kept);
  };
  TreeCopier copier(leaf, /*copies_once=*/false);
  copying = &copier;
  return copier.copy(state);
}

}  // namespace bytecheckpoint::bridge
