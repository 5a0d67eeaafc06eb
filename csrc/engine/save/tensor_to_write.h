// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <string>

#include "csrc/staging/device_copies.h"
#include "csrc/tensor/strided_view.h"

namespace bytecheckpoint::engine {

/// A tensor to write: `box` of the tensor `fqn`, with the elements of `view`. Borrows both names and memory.
struct TensorToWrite {
  const std::string* fqn;
  const tensor::Box* box;
  tensor::StridedView view;
  int device = staging::kHost;  // whose memory it is
};

}  // namespace bytecheckpoint::engine
