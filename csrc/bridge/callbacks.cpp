// SPDX-License-Identifier: Apache-2.0
#include "csrc/bridge/callbacks.h"

#include "csrc/bridge/gil.h"

namespace bytecheckpoint::bridge {

namespace py = pybind11;

bool Callbacks::progress(int64_t done) {
  const WithGil locked;
  raised_ = raised_ || PyErr_CheckSignals() != 0;
  if (!raised_ && !progress_.is_none()) call(progress_, Py_BuildValue("(L)", static_cast<long long>(done)));
  return !raised_;
}

base::Status Callbacks::convert(const engine::ElementsToConvert& elements) {
  const WithGil locked;
  const auto view = [&](const void* bytes, tensor::DType dtype) {
    const int64_t size = elements.count * tensor::find_dtype(dtype)->itemsize_bytes;
    return PyMemoryView_FromMemory(static_cast<char*>(const_cast<void*>(bytes)), size, PyBUF_WRITE);
  };
  call(convert_, Py_BuildValue("(sLsNsN)", elements.fqn->c_str(), static_cast<long long>(elements.first),
                               tensor::find_dtype(elements.from)->name, view(elements.elements, elements.from),
                               tensor::find_dtype(elements.to)->name, view(elements.converted, elements.to)));
  return raised_ ? base::Status::make(base::Code::kCancelled, "conversion failed") : base::Status::ok();
}

bool Progress::operator()(int64_t done, int64_t total) {
  const WithGil locked;
  raised_ = PyErr_CheckSignals() != 0;
  if (!raised_ && !function_.is_none()) {
    const py::object outcome = py::reinterpret_steal<py::object>(take_gil([&] {
      return PyObject_CallFunction(function_.ptr(), "LL", static_cast<long long>(done), static_cast<long long>(total));
    }));
    raised_ = !outcome;
  }
  return !raised_;
}

void Callbacks::call(const py::object& function, PyObject* arguments) {
  const py::object args = py::reinterpret_steal<py::object>(arguments);
  const py::object outcome = py::reinterpret_steal<py::object>(
      take_gil([&] { return args ? PyObject_CallObject(function.ptr(), args.ptr()) : nullptr; }));
  raised_ = raised_ || !outcome;
}

}  // namespace bytecheckpoint::bridge
