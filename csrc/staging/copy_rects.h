// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>

#include "csrc/staging/joined_dims.h"

namespace bytecheckpoint::staging {

/// Rows of bytes at an even distance in a tensor's memory, and one after the other where they are packed. One pitched
/// copy moves them:
///
///     memory   |row 0 |......|row 1 |......|row 2 |      distance of the rows: pitch_bytes
///     packed   |row 0 |row 1 |row 2 |
struct CopyRect {
  int64_t memory_offset;  // from the tensor's first element; may be negative
  int64_t packed_offset;
  int64_t row_bytes;
  int64_t pitch_bytes;  // from row to row in memory; row_bytes if there is one row
  int64_t num_rows;
};

/// Divides a strided tensor into rectangles, for copies without a kernel. Most tensors need few; the worst case is one
/// rectangle for each element.
class CopyRects {
 public:
  /// \param view             Has a plain dtype. Its size in bytes fits in int64.
  /// \param max_pitch_bytes  Rows that are further apart, go backwards or overlap become rectangles of one row.
  CopyRects(const tensor::StridedView& view, int64_t max_pitch_bytes);

  int64_t num_rects() const { return num_rects_; }
  /// Returns rectangle `number`, in row-major order. O(dims).
  CopyRect rect(int64_t number) const;

 private:
  JoinedDims outer_;  // the dims around a rectangle
  int64_t pitch_bytes_ = 0;
  int64_t num_rows_ = 1;
  int64_t num_rects_ = 0;
};

}  // namespace bytecheckpoint::staging
