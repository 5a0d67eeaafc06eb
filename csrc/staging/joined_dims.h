// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>

#include "csrc/tensor/strided_view.h"

namespace bytecheckpoint::staging {

/// A strided tensor as runs of contiguous bytes, in row-major order.
///
/// Dims of size 1 are dropped, and neighbours that continue one another are joined, so that a contiguous tensor is one
/// run.
struct JoinedDims {
  tensor::Dims sizes;          // the dims around a run, outermost first
  tensor::Dims strides_bytes;  // 0 where expanded; may be negative
  int64_t run_bytes = 0;       // 0 only if there are no elements
};

/// \param view  Has a plain dtype. Its size in bytes fits in int64. Pure.
JoinedDims join_dims(const tensor::StridedView& view);

}  // namespace bytecheckpoint::staging
