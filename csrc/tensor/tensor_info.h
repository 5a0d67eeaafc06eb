// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>

#include "csrc/tensor/box.h"
#include "csrc/tensor/dtype.h"

namespace bytecheckpoint::tensor {

/// The properties of a tensor that DCP's metadata keep (TensorProperties), and the sizes of the whole tensor.
struct TensorInfo {
  DType dtype = DType::kNone;
  bool requires_grad = false;
  bool pin_memory = false;
  uint8_t memory_format = 0;  // 0 contiguous, 1 channels last, 2 preserve
  Dims sizes;
};

}  // namespace bytecheckpoint::tensor
