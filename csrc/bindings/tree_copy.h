// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <pybind11/pybind11.h>

#include <functional>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

namespace bytecheckpoint::bindings {

/// Copies what holds the values of a state dict: dicts, OrderedDicts, lists and tuples, at any depth. Each is copied
/// once, as by `copy.deepcopy`: where it is in several places, so is its copy. Needs the GIL.
class TreeCopier {
 public:
  /// \param leaf  From any other value to what takes its place.
  explicit TreeCopier(std::function<pybind11::object(pybind11::handle)> leaf) : leaf_(std::move(leaf)) {}

  pybind11::object copy(pybind11::handle value);
  /// Keys and positions that lead to the value at hand, joined as DCP joins them.
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
  const pybind11::object ordered_dict_ = pybind11::module_::import("collections").attr("OrderedDict");
  std::vector<pybind11::object> path_;
  std::unordered_map<PyObject*, Copied> copied_;  // containers, while `copy` runs
};

}  // namespace bytecheckpoint::bindings
