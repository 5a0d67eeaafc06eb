// SPDX-License-Identifier: Apache-2.0
#include "csrc/bindings/bind.h"

#include <cstdint>

namespace bytecheckpoint::bindings {
namespace {

namespace py = pybind11;

/// Keeps the garbage collector from running, since it may run other code that releases the GIL.
class PauseGarbageCollection {
 public:
  PauseGarbageCollection() : was_enabled_(PyGC_Disable() != 0) {}
  ~PauseGarbageCollection() {
    if (was_enabled_) PyGC_Enable();
  }
  PauseGarbageCollection(const PauseGarbageCollection&) = delete;
  PauseGarbageCollection& operator=(const PauseGarbageCollection&) = delete;

 private:
  const bool was_enabled_;
};

/// Whether a thread is in this very call of a function.
///
/// Holds the GIL throughout, so that the thread stands still. Python code could not do that: if the thread leaves a
/// generator meanwhile, the generator no longer knows its caller, and the call would seem to have ended.
///
/// \param thread  Its `ident`.
/// \param frame   The `id` of the call's frame.
/// \param code    The code object of the function.
bool is_in_call(int64_t thread, uintptr_t frame, py::handle code) {
  const PauseGarbageCollection none;
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
