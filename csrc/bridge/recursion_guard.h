// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <pybind11/pybind11.h>

namespace bytecheckpoint::bridge {

/// Counts one level of recursion towards Python's limit, so that a dict that contains itself is a RecursionError. Needs
/// the GIL.
class RecursionGuard {
 public:
  /// \param where  The end of the error message: " while ...".
  explicit RecursionGuard(const char* where) {
    if (Py_EnterRecursiveCall(where) != 0) throw pybind11::error_already_set();
  }
  ~RecursionGuard() { Py_LeaveRecursiveCall(); }
  RecursionGuard(const RecursionGuard&) = delete;
  RecursionGuard& operator=(const RecursionGuard&) = delete;
};

}  // namespace bytecheckpoint::bridge
