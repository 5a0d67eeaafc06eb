// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <pybind11/pybind11.h>

#include <string_view>

namespace bytecheckpoint::bridge {

/// A view of the contiguous memory of a Python object, valid while this lives. Raises BufferError or TypeError if it
/// has none. Construct and destroy it with the GIL.
class BufferView {
 public:
  explicit BufferView(pybind11::handle owner) {
    if (PyObject_GetBuffer(owner.ptr(), &buffer_, PyBUF_SIMPLE) != 0) throw pybind11::error_already_set();
  }
  ~BufferView() { PyBuffer_Release(&buffer_); }
  BufferView(const BufferView&) = delete;
  BufferView& operator=(const BufferView&) = delete;

  std::string_view bytes() const { return {static_cast<const char*>(buffer_.buf), static_cast<size_t>(buffer_.len)}; }

 private:
  Py_buffer buffer_;
};

}  // namespace bytecheckpoint::bridge
