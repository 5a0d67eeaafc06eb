// SPDX-License-Identifier: Apache-2.0
#include "csrc/bindings/bind_calls.h"

#include <cstdint>

namespace bytecheckpoint::bindings {
namespace {

namespace py = pybind11;

/// Keeps the garbage collector from running, and with it code of others that could let the GIL go.
class WithoutCollection {
 public:
  WithoutCollection() : was_enabled_(PyGC_Disable() != 0) {}
  ~WithoutCollection() {
    if (was_enabled_) PyGC_Enable();
  }
  WithoutCollection(const WithoutCollection&) = delete;
  WithoutCollection& operator=(const WithoutCollection&) = delete;

 private:
  const bool was_enabled_;
};

/// Is a thread in this very call of a function?
///
/// Looks without letting the GIL go, so that the thread stands still. Python code could not: a generator that the
/// thread leaves meanwhile no longer knows who called it, and the call would seem to have ended.
///
/// \param thread  Its `ident`. \param frame  The `id` of the call's frame. \param code  Of the function.
bool is_in_call(int64_t thread, uintptr_t frame, py::handle code) {
  const WithoutCollection none;
  const py::dict frames = py::module_::import("sys").attr("_current_frames")();
  py::object at = frames.attr("get")(thread);
  while (!at.is_none()) {
    auto* const object = reinterpret_cast<PyFrameObject*>(at.ptr());
    if (reinterpret_cast<uintptr_t>(object) == frame) {
      const auto of_frame = py::reinterpret_steal<py::object>(reinterpret_cast<PyObject*>(PyFrame_GetCode(object)));
      if (of_frame.is(code)) return true;
    }
    PyFrameObject* const caller = PyFrame_GetBack(object);
    at = caller == nullptr ? py::none() : py::reinterpret_steal<py::object>(reinterpret_cast<PyObject*>(caller));
  }
  return false;
}

}  // namespace

void bind_calls(py::module_& m) {
  m.def("is_in_call", &is_in_call, py::arg("thread"), py::arg("frame"), py::arg("code"));
}

}  // namespace bytecheckpoint::bindings
