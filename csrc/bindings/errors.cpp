// SPDX-License-Identifier: Apache-2.0
#include "csrc/bindings/errors.h"

namespace bytecheckpoint::bindings {

void raise(const base::Status& status) {
  namespace py = pybind11;
  const py::object error =
      py::module_::import("bytecheckpoint.errors")
          .attr("from_status")(static_cast<int>(status.code()), status.message(), status.path(), status.sys_errno());
  PyErr_SetObject(reinterpret_cast<PyObject*>(Py_TYPE(error.ptr())), error.ptr());
  throw py::error_already_set();
}

}  // namespace bytecheckpoint::bindings
