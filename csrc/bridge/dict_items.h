// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <pybind11/pybind11.h>

#include <utility>
#include <vector>

namespace bytecheckpoint::bridge {

/// Calls `visit(key, value)` for each item that is in a dict at the time of the call. `visit` may release the GIL, and
/// others may change the dict meanwhile. Needs the GIL.
///
/// Makes no tuples of keys and values: the garbage collector would count them as new objects that stay, and soon look
/// at all objects of the process.
template <class Visit>
void for_each_item(pybind11::handle dict, const Visit& visit) {
  namespace py = pybind11;
  std::vector<std::pair<py::object, py::object>> items;
  items.reserve(static_cast<size_t>(PyDict_Size(dict.ptr())));
  if (PyDict_CheckExact(dict.ptr())) {
    PyObject *key = nullptr, *value = nullptr;
    for (Py_ssize_t position = 0; PyDict_Next(dict.ptr(), &position, &key, &value) != 0;) {
      items.emplace_back(py::reinterpret_borrow<py::object>(key), py::reinterpret_borrow<py::object>(value));
    }
  } else {  // subclasses, like OrderedDict, may have an order of their own
    const auto keys = py::reinterpret_steal<py::list>(PySequence_List(dict.ptr()));
    if (!keys) throw py::error_already_set();
    for (const py::handle key : keys) {
      auto value = py::reinterpret_borrow<py::object>(PyDict_GetItemWithError(dict.ptr(), key.ptr()));
      if (!value && PyErr_Occurred() != nullptr) throw py::error_already_set();
      if (value) items.emplace_back(py::reinterpret_borrow<py::object>(key), std::move(value));
    }
  }
  for (const auto& [key, value] : items) visit(key, value);
}

}  // namespace bytecheckpoint::bridge
