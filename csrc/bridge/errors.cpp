// SPDX-License-Identifier: Apache-2.0
#include "csrc/bridge/errors.h"

#include <algorithm>
#include <exception>

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

void raise_for_value(const std::string& fqn, py::handle value) {
  const py::module_ errors = py::module_::import("bytecheckpoint.errors");
  std::string why;
  py::object cause = py::none();
  try {
    throw;
  } catch (const py::error_already_set& error) {
    if (!error.matches(PyExc_Exception) || error.matches(errors.attr("CheckpointError"))) throw;
    cause = error.value();
    why = py::str(cause);
  } catch (const std::exception& error) {
    why = error.what();
    why.resize(std::min(why.find('\n'), why.size()));  // torch adds a stack of C++
  }
  py::object raised = errors.attr("InvalidPlanError")(to_text(
      base::text("'", fqn, "': shape and shards of a ", Py_TYPE(value.ptr())->tp_name, " cannot be read: ", why)));
  raised.attr("__cause__") = cause;
  throw_error(raised);
}

}  // namespace bytecheckpoint::bridge
