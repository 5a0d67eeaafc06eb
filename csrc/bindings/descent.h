// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <pybind11/pybind11.h>

namespace bytecheckpoint::bindings {

/// Counts towards Python's own limit, so that a dict that holds itself is a RecursionError. Needs the GIL.
class Descent {
 public:
  /// \param where  Ends the message: " while ...".
  explicit Descent(const char* where) {
    if (Py_EnterRecursiveCall(where) != 0) throw pybind11::error_already_set();
  }
  ~Descent() { Py_LeaveRecursiveCall(); }
  Descent(const Descent&) = delete;
  Descent& operator=(const Descent&) = delete;
};

}  // namespace bytecheckpoint::bindings
