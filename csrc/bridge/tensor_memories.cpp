// SPDX-License-Identifier: Apache-2.0
#include "csrc/bridge/tensor_memories.h"

#include <utility>

#include "csrc/bridge/errors.h"
#include "csrc/bridge/torch_tensor.h"
#include "csrc/bridge/unlocked.h"

namespace bytecheckpoint::bridge {

namespace py = pybind11;
using staging::TensorMemory;

std::optional<TensorMemory> TensorMemories::memory_to_save(py::handle value) {
  base::Result<tensor::StridedView> view = view_of_plain_tensor(value.ptr());
  if (view.is_ok()) return TensorMemory{staging::kHost, std::move(view.value())};
  return on_device(value, /*writable=*/false);
}

std::optional<TensorMemory> TensorMemories::memory_to_fill(py::handle value) {
  base::Result<tensor::StridedView> view = view_of_tensor(value.ptr(), /*writable=*/true);
  if (view.is_ok()) return TensorMemory{staging::kHost, std::move(view.value())};
  return on_device(value, /*writable=*/true);
}

std::optional<TensorMemory> TensorMemories::on_device(py::handle value, bool writable) {
  if (!is_plain_tensor(value.ptr())) return std::nullopt;
  const std::optional<int> device = cuda_device_of(value.ptr());
  if (!device.has_value()) return std::nullopt;
  if (!copies_.knows(*device)) {
    const auto stream = current_stream_(*device).cast<uintptr_t>();
    (void)value_unlocked([&] { return copies_.use(*device, stream); });  // takes a moment
  }
  if (!copies_.can_copy(*device)) return std::nullopt;
  base::Result<tensor::StridedView> view = view_of_cuda_tensor(value.ptr(), writable);
  if (!view.is_ok()) return std::nullopt;
  return TensorMemory{*device, std::move(view.value())};
}

}  // namespace bytecheckpoint::bridge
