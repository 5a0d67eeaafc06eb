// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>

#include "csrc/tensor/strided_view.h"

namespace bytecheckpoint::staging {

/// A strided tensor as runs of bytes that are contiguous in memory, in row-major order.
///
/// Dims of size 1 are gone, and dims that continue one another are one, so that a contiguous tensor is one run.
struct JoinedDims {
  tensor::Dims sizes;          // of what is around a run, outermost first
  tensor::Dims strides_bytes;  // 0 where expanded; may be negative
  int64_t run_bytes = 0;       // 0 only if there are no elements
};

/// \param view  Of a plain dtype. Its byte size fits in int64.
JoinedDims join_dims(const tensor::StridedView& view);

}  // namespace bytecheckpoint::staging
