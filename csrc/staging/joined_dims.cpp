// SPDX-License-Identifier: Apache-2.0
#include "csrc/staging/joined_dims.h"

#include "csrc/tensor/dtype.h"

namespace bytecheckpoint::staging {

JoinedDims join_dims(const tensor::StridedView& view) {
  JoinedDims joined;
  const auto push = [&](int64_t size, int64_t stride_bytes) {
    if (size == 1) return;
    if (!joined.sizes.empty() && joined.strides_bytes.back() == size * stride_bytes) {
      joined.sizes.back() *= size;
      joined.strides_bytes.back() = stride_bytes;
    } else {
      joined.sizes.push_back(size);
      joined.strides_bytes.push_back(stride_bytes);
    }
  };
  for (size_t d = 0; d < view.sizes.size(); ++d) {
    if (view.sizes[d] == 0) return {};
    push(view.sizes[d], view.strides_bytes[d]);
  }
  push(tensor::find_plain_dtype(view.dtype)->itemsize_bytes, 1);  // treats the bytes of an element as the innermost dim

  joined.run_bytes = 1;
  if (!joined.sizes.empty() && joined.strides_bytes.back() == 1) {
    joined.run_bytes = joined.sizes.back();
    joined.sizes.resize(joined.sizes.size() - 1);
    joined.strides_bytes.resize(joined.sizes.size());
  }
  return joined;
}

}  // namespace bytecheckpoint::staging
