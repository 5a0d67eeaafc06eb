// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>

#include "csrc/tensor/strided_view.h"

namespace bytecheckpoint::staging {

/// A tensor on a device, or a part of one, and where its row-major bytes are in a host buffer.
struct DevicePiece {
  tensor::StridedView view;  // has a plain dtype; `data` is device memory
  int64_t host_offset = 0;   // of its first byte
};

}  // namespace bytecheckpoint::staging
