// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <pybind11/pybind11.h>

#include <string_view>

namespace bytecheckpoint::bindings {

/// Contiguous memory of an object, while this lives.
class Contents {
 public:
  explicit Contents(pybind11::handle owner) {
    if (PyObject_GetBuffer(owner.ptr(), &buffer_, PyBUF_SIMPLE) != 0) throw pybind11::error_already_set();
  }
  ~Contents() { PyBuffer_Release(&buffer_); }
  Contents(const Contents&) = delete;
  Contents& operator=(const Contents&) = delete;

  std::string_view bytes() const { return {static_cast<const char*>(buffer_.buf), static_cast<size_t>(buffer_.len)}; }

 private:
  Py_buffer buffer_;
};

}  // namespace bytecheckpoint::bindings
