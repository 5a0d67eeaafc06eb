// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <pybind11/pybind11.h>

#include <cstdint>
#include <memory>

#include "csrc/bridge/gil.h"

// What C++ asks of Python while it holds objects. pybind11's own calls let the stack be unwound if the interpreter
// shuts down meanwhile (see gil.h), and then objects are released without the GIL.

namespace bytecheckpoint::bridge {

namespace detail {

inline pybind11::object owned(PyObject* value) {
  if (value == nullptr) throw pybind11::error_already_set();
  return pybind11::reinterpret_steal<pybind11::object>(value);
}

}  // namespace detail

/// Returns an attribute, which a property may compute.
inline pybind11::object attribute(pybind11::handle of, pybind11::handle name) {
  return detail::owned(take_gil([&] { return PyObject_GetAttr(of.ptr(), name.ptr()); }));
}

/// Calls `function` with objects.
template <class... Args>
pybind11::object call_python(pybind11::handle function, const Args&... args) {
  return detail::owned(take_gil([&] { return PyObject_CallFunctionObjArgs(function.ptr(), args.ptr()..., nullptr); }));
}

/// Returns the number of a value in `numbers`, whose hash may be computed by Python; a new value gets the next one.
inline int64_t number_in(const pybind11::dict& numbers, pybind11::handle value) {
  const pybind11::int_ next(numbers.size());
  PyObject* number = take_gil([&] { return PyDict_SetDefault(numbers.ptr(), value.ptr(), next.ptr()); });
  if (number == nullptr) throw pybind11::error_already_set();
  return pybind11::handle(number).cast<int64_t>();
}

/// Returns the only `Found` of the process, which is made of Python objects when it is first asked for, and never
/// freed.
///
/// The GIL guards it. pybind11's own (gil_safe_call_once_and_store) releases the GIL, and takes it again in a
/// destructor, where an interpreter that shuts down would abort the process. A plain static would wait for another
/// thread with the GIL held.
template <class Found>
const Found& found_once() {
  static const Found* found = nullptr;
  if (found == nullptr) {
    auto made = std::make_unique<const Found>();  // runs Python, so another thread may come here meanwhile
    if (found == nullptr) found = made.release();
  }
  return *found;
}

}  // namespace bytecheckpoint::bridge
