// SPDX-License-Identifier: Apache-2.0
#include "csrc/staging/copy_rects.h"

namespace bytecheckpoint::staging {

CopyRects::CopyRects(const tensor::StridedView& view, int64_t max_pitch_bytes) : outer_(join_dims(view)) {
  if (outer_.run_bytes == 0) return;
  pitch_bytes_ = outer_.run_bytes;
  if (!outer_.sizes.empty()) {
    const int64_t stride_bytes = outer_.strides_bytes.back();
    if (stride_bytes >= outer_.run_bytes && stride_bytes <= max_pitch_bytes) {
      pitch_bytes_ = stride_bytes;
      num_rows_ = outer_.sizes.back();
      outer_.sizes.resize(outer_.sizes.size() - 1);
      outer_.strides_bytes.resize(outer_.sizes.size());
    }
  }
  num_rects_ = 1;
  for (const int64_t size : outer_.sizes) num_rects_ *= size;
}

CopyRect CopyRects::rect(int64_t number) const {
  CopyRect rect{0, number * num_rows_ * outer_.run_bytes, outer_.run_bytes, pitch_bytes_, num_rows_};
  for (size_t d = outer_.sizes.size(); d-- > 0; number /= outer_.sizes[d]) {
    rect.memory_offset += number % outer_.sizes[d] * outer_.strides_bytes[d];
  }
  return rect;
}

}  // namespace bytecheckpoint::staging
