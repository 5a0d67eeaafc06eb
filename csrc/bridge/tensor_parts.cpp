// SPDX-License-Identifier: Apache-2.0
#include "csrc/bridge/tensor_parts.h"

#include "csrc/bridge/dims_caster.h"
#include "csrc/bridge/python_calls.h"
#include "csrc/bridge/torch_tensor.h"

namespace bytecheckpoint::bridge {
namespace {

namespace py = pybind11;

/// Names and classes, looked up once and never freed.
struct NamesOfParts {
  bool is_known = py::hasattr(py::module_::import("torch.distributed.checkpoint"), "CheckpointableTensor");
  py::object global_shape = py::str("global_shape"), global_offsets = py::str("global_offsets"),
             local_offsets = py::str("local_offsets"), local_sizes = py::str("local_sizes");
  py::object deepcopy = py::module_::import("copy").attr("deepcopy");
};

const NamesOfParts& names_of_parts() {
  return found_once<NamesOfParts>();
}

/// Whether the tensor has an attribute. Creates no AttributeError: that would cost more than all else that is read of a
/// tensor.
bool has(py::handle tensor, const py::object& name) {
  PyObject* value = nullptr;
#if PY_VERSION_HEX >= 0x030D0000
  const int found = PyObject_GetOptionalAttr(tensor.ptr(), name.ptr(), &value);
#else
  const int found = _PyObject_LookupAttr(tensor.ptr(), name.ptr(), &value);
#endif
  if (found < 0) throw py::error_already_set();
  Py_XDECREF(value);
  return found > 0;
}

}  // namespace

bool is_marked_as_parts(py::handle tensor) {
  const NamesOfParts& of = names_of_parts();
  return of.is_known && is_plain_tensor(tensor.ptr()) && has(tensor, of.global_shape) &&
         has(tensor, of.global_offsets) && has(tensor, of.local_offsets) && has(tensor, of.local_sizes);
}

tensor::Dims global_shape_of_parts(py::handle tensor) {
  tensor::Dims shape;
  for (const py::handle size : tensor.attr(names_of_parts().global_shape)) shape.push_back(size.cast<int64_t>());
  return shape;
}

py::object part_of(py::handle tensor, size_t box) {
  const py::tuple begins(py::tuple(tensor.attr(names_of_parts().local_offsets))[box]);
  const py::tuple sizes(py::tuple(tensor.attr(names_of_parts().local_sizes))[box]);
  py::tuple slices(begins.size());
  for (size_t d = 0; d < slices.size(); ++d) {
    const auto begin = begins[d].cast<int64_t>();
    slices[d] = py::slice(begin, begin + sizes[d].cast<int64_t>(), 1);
  }
  return tensor[slices];
}

void copy_marks(py::handle marked, py::handle copy) {
  const NamesOfParts& of = names_of_parts();
  for (const py::object& name : {of.global_shape, of.global_offsets, of.local_offsets, of.local_sizes}) {
    copy.attr(name) = of.deepcopy(marked.attr(name));
  }
}

}  // namespace bytecheckpoint::bridge
