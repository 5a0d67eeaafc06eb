// SPDX-License-Identifier: Apache-2.0
#include "csrc/bridge/standard_tensors.h"

#include <cstdint>
#include <cstring>
#include <stdexcept>
#include <string>

#include "csrc/tensor/dtype.h"

namespace bytecheckpoint::bridge {
namespace {

namespace py = pybind11;
using format::StandardTensor;

py::tuple tuple_of(const tensor::Dims& numbers) {
  py::tuple made(numbers.size());
  for (size_t d = 0; d < numbers.size(); ++d) made[d] = numbers[d];
  return made;
}

/// Moves a storage to its device. \throws std::runtime_error with torch's reason if torch raises.
py::object to_device(const py::object& storage, const std::string& location) {
  try {
    return py::module_::import("torch.serialization").attr("default_restore_location")(storage, location);
  } catch (const py::error_already_set& error) {
    if (!error.matches(PyExc_RuntimeError)) throw;
    throw std::runtime_error(error.what());
  }
}

}  // namespace

py::object StandardTensors::make(const StandardTensor& tensor) {
  const format::PickledTensor& pickled = tensor.pickled;
  const py::module_ torch = py::module_::import("torch");
  const py::object storage = storage_of(tensor);
  const py::object empty = torch.attr("empty")(0, py::arg("dtype") = torch.attr(pickled.dtype->name),
                                               py::arg("device") = storage.attr("device"));
  const py::object made = empty.attr("set_")(storage, pickled.first_element, tuple_of(tensor.archived.sizes),
                                             tuple_of(tensor.archived.strides));
  if (pickled.is_parameter) return torch.attr("nn").attr("Parameter")(made, pickled.requires_grad);
  return pickled.requires_grad ? made.attr("requires_grad_")() : made;
}

py::object StandardTensors::storage_of(const StandardTensor& tensor) {
  const format::ArchivedTensor& archived = tensor.archived;
  const auto [found, is_new] = storages_.try_emplace(archived.storage_offset);
  if (!is_new && found->second) return found->second;
  const py::module_ torch = py::module_::import("torch");
  const py::object storage = torch.attr("UntypedStorage")(archived.storage_bytes, py::arg("device") = "cpu");
  if (archived.storage_bytes > 0) {
    std::memcpy(reinterpret_cast<void*>(storage.attr("data_ptr")().cast<uintptr_t>()),
                archive_.data() + archived.storage_offset, static_cast<size_t>(archived.storage_bytes));
  }
  const std::string location(tensor.pickled.location);
  found->second = location == "cpu" ? storage : to_device(storage, location);
  return found->second;
}

}  // namespace bytecheckpoint::bridge
