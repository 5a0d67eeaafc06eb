// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <pybind11/pybind11.h>

#include <cstdint>
#include <string_view>
#include <unordered_map>

#include "csrc/format/torch/standard_pickle.h"

namespace bytecheckpoint::bridge {

/// Makes the tensors in an archive of torch.save, beside values of standard types, as torch.load makes them: tensors
/// over one storage share it, and storages go back to the device that they were on. Needs the GIL.
class StandardTensors {
 public:
  /// \param archive  All bytes of the archive; must outlive this.
  explicit StandardTensors(std::string_view archive) : archive_(archive) {}

  /// Makes one tensor. Raises RuntimeError if its device is not there.
  pybind11::object make(const format::StandardTensor& tensor);

 private:
  pybind11::object storage_of(const format::StandardTensor& tensor);

  std::string_view archive_;
  std::unordered_map<int64_t, pybind11::object> storages_;  // by offset in the archive
};

}  // namespace bytecheckpoint::bridge
