// SPDX-License-Identifier: Apache-2.0
#include "csrc/bridge/errors.h"

namespace bytecheckpoint::bridge {
namespace {

namespace py = pybind11;

[[noreturn]] void throw_error(const py::object& error) {
  PyErr_SetObject(reinterpret_cast<PyObject*>(Py_TYPE(error.ptr())), error.ptr());
  throw py::error_already_set();
}

}  // namespace

py::str to_text(const std::string& bytes) {
  return py::reinterpret_steal<py::str>(
      PyUnicode_DecodeUTF8(bytes.data(), static_cast<Py_ssize_t>(bytes.size()), "backslashreplace"));
}

void raise(const base::Status& status) {
  throw_error(py::module_::import("bytecheckpoint.errors")
                  .attr("from_status")(static_cast<int>(status.code()), to_text(status.message()),
                                       py::reinterpret_steal<py::str>(PyUnicode_DecodeFSDefaultAndSize(
                                           status.path().data(), static_cast<Py_ssize_t>(status.path().size()))),
                                       status.sys_errno()));
}

void raise_as(const char* class_name, const std::string& message) {
  throw_error(py::module_::import("bytecheckpoint.errors").attr(class_name)(to_text(message)));
}

}  // namespace bytecheckpoint::bridge
