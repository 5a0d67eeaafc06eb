// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <pybind11/pybind11.h>

#include <optional>
#include <utility>

#include "csrc/staging/device_copies.h"
#include "csrc/staging/load_targets.h"

namespace bytecheckpoint::bridge {

/// Finds the memory of the tensors of one save or one load, on the host and on devices. Needs the GIL, except for
/// `copies`.
class TensorMemories {
 public:
  /// \param current_stream  Function from the number of a device to this thread's current stream of it.
  explicit TensorMemories(pybind11::object current_stream) : current_stream_(std::move(current_stream)) {}

  /// Returns the memory of a plain tensor; nothing for any other value, or if it is on a device that this build or this
  /// machine cannot copy from. Raises DeviceError.
  std::optional<staging::TensorMemory> memory_to_save(pybind11::handle value);
  /// Returns the memory of a tensor that is to be filled, also of a subclass if it is on the host. As above.
  std::optional<staging::TensorMemory> memory_to_fill(pybind11::handle value);
  /// Knows all devices of which memory was returned.
  staging::DeviceCopies* copies() { return &copies_; }

 private:
  std::optional<staging::TensorMemory> on_device(pybind11::handle value, bool writable);

  pybind11::object current_stream_;
  staging::DeviceCopies copies_;
};

}  // namespace bytecheckpoint::bridge
