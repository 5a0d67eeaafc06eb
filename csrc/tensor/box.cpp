// SPDX-License-Identifier: Apache-2.0
#include "csrc/tensor/box.h"

#include <algorithm>

#include "csrc/base/bytes.h"

namespace bytecheckpoint::tensor {

bool checked_numel(const Dims& sizes, int64_t* numel) {
  int64_t product = 1;
  for (int64_t size : sizes) {
    if (!base::checked_mul(product, size, &product)) return false;
  }
  *numel = product;
  return true;
}

Box whole(const Dims& sizes) {
  return Box{Dims(sizes.size(), 0), sizes};
}

bool is_inside(const Box& box, const Dims& sizes) {
  if (box.offsets.size() != sizes.size() || box.sizes.size() != sizes.size()) return false;
  for (size_t d = 0; d < sizes.size(); ++d) {
    int64_t end;
    if (!base::checked_add(box.offsets[d], box.sizes[d], &end) || end > sizes[d]) return false;
  }
  return true;
}

bool intersect(const Box& a, const Box& b, Box* common) {
  if (a.num_dims() != b.num_dims()) return false;
  Box result{Dims(a.num_dims()), Dims(a.num_dims())};
  for (size_t d = 0; d < a.num_dims(); ++d) {
    const int64_t begin = std::max(a.offsets[d], b.offsets[d]);
    const int64_t end = std::min(a.offsets[d] + a.sizes[d], b.offsets[d] + b.sizes[d]);
    if (begin >= end) return false;
    result.offsets[d] = begin;
    result.sizes[d] = end - begin;
  }
  *common = std::move(result);
  return true;
}

Dims row_major_strides(const Dims& sizes) {
  Dims strides(sizes.size());
  // Unsigned, because the strides of a hostile shape without elements may wrap around. Nobody uses them then.
  uint64_t stride = 1;
  for (size_t d = sizes.size(); d-- > 0;) {
    strides[d] = static_cast<int64_t>(stride);
    stride *= static_cast<uint64_t>(std::max<int64_t>(sizes[d], 1));
  }
  return strides;
}

std::string to_text(const Dims& dims) {
  std::string out = "[";
  for (size_t d = 0; d < dims.size(); ++d) {
    if (d != 0) out += ", ";
    out += std::to_string(dims[d]);
  }
  return out + "]";
}

}  // namespace bytecheckpoint::tensor
