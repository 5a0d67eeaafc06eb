// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>

#include "csrc/staging/joined_dims.h"

namespace bytecheckpoint::staging {

/// Rows of bytes, evenly apart in a tensor's memory and one behind another where it is packed: what one pitched copy
/// moves.
struct CopyRect {
  int64_t memory_offset;  // from the tensor's first element; may be negative
  int64_t packed_offset;
  int64_t row_bytes;
  int64_t pitch_bytes;  // from row to row in memory; row_bytes if there is one row
  int64_t num_rows;
};

/// A strided tensor as rectangles, for copies without a kernel: few of most, one an element of the worst.
class CopyRects {
 public:
  /// \param view             Of a plain dtype. Its byte size fits in int64.
  /// \param max_pitch_bytes  Rows that are further apart, or backwards, or on top of one another, go one by one.
  CopyRects(const tensor::StridedView& view, int64_t max_pitch_bytes);

  int64_t num_rects() const { return num_rects_; }
  CopyRect rect(int64_t number) const;

 private:
  JoinedDims outer_;  // without the dim of the rows
  int64_t pitch_bytes_ = 0;
  int64_t num_rows_ = 1;
  int64_t num_rects_ = 0;
};

}  // namespace bytecheckpoint::staging
