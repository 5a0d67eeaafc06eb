// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <pybind11/pybind11.h>

namespace bytecheckpoint::bindings {

/// Calls `visit(key, value)` for what is in a dict now, also where `visit` lets the GIL go and others change the dict
/// meanwhile: what is taken out is then left out.
///
/// By a list of its keys. One of its items would be as many tuples, which the garbage collector counts as objects that
/// stay, and soon looks at everything there is. Needs the GIL.
template <class Visit>
void for_each_item(pybind11::handle dict, const Visit& visit) {
  namespace py = pybind11;
  const auto keys = py::reinterpret_steal<py::list>(PySequence_List(dict.ptr()));
  if (!keys) throw py::error_already_set();
  for (const py::handle key : keys) {
    const auto value = py::reinterpret_borrow<py::object>(PyDict_GetItemWithError(dict.ptr(), key.ptr()));
    if (value) {
      visit(key, value);
    } else if (PyErr_Occurred() != nullptr) {
      throw py::error_already_set();
    }
  }
}

}  // namespace bytecheckpoint::bindings
