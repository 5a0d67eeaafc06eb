// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <pybind11/pybind11.h>

#include <functional>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

namespace bytecheckpoint::bridge {

/// Copies the containers of a state dict: dicts, OrderedDicts, lists and tuples, at any depth. Like `copy.deepcopy` it
/// copies each container once: one that is in several places has one copy. Needs the GIL.
class TreeCopier {
 public:
  /// \param leaf  Function from any other value to what takes its place.
  /// \param copies_once  False: a container that is in several places gets a copy in each, because what takes the place
  /// of a leaf depends on the path.
  explicit TreeCopier(std::function<pybind11::object(pybind11::handle)> leaf, bool copies_once = true)
      : leaf_(std::move(leaf)), copies_once_(copies_once) {}

  /// Copies a value with all that is in it.
  pybind11::object copy(pybind11::handle value);
  /// Copies what takes the place of a leaf. For `leaf`.
  pybind11::object copy_below(pybind11::handle value) { return copy_value(value); }
  /// Returns the keys and positions that lead to the current value, joined as DCP joins them. For `leaf`.
  std::string path() const;

 private:
  struct Copied {
    pybind11::object original;  // kept, so that nothing else gets its address
    pybind11::object copy;
  };

  pybind11::object copy_value(pybind11::handle value);
  pybind11::object copy_container(pybind11::handle container);
  pybind11::object copy_dict(pybind11::handle dict);
  pybind11::object copy_at(pybind11::object step, pybind11::handle value);

  const std::function<pybind11::object(pybind11::handle)> leaf_;
  const bool copies_once_;
  const pybind11::object ordered_dict_ = pybind11::module_::import("collections").attr("OrderedDict");
  std::vector<pybind11::object> path_;
  std::unordered_map<PyObject*, Copied> copied_;  // containers, while `copy` runs
};

}  // namespace bytecheckpoint::bridge
