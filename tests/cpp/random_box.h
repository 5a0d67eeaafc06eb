// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <algorithm>
#include <random>
#include <vector>

#include "csrc/tensor/box.h"
#include "csrc/tensor/dtype.h"

namespace bytecheckpoint::test {

using Random = std::mt19937_64;

inline int64_t draw(Random* random, int64_t low, int64_t high) {
  return std::uniform_int_distribution<int64_t>(low, high)(*random);
}

/// A dtype whose elements are stored as they are.
inline tensor::DType draw_plain_dtype(Random* random) {
  for (;;) {
    const auto dtype = static_cast<tensor::DType>(draw(random, 1, tensor::kLastDType));
    if (tensor::find_dtype(dtype)->is_plain()) return dtype;
  }
}

inline tensor::Dims draw_sizes(Random* random, int64_t max_dims, int64_t max_size) {
  tensor::Dims sizes(static_cast<size_t>(draw(random, 0, max_dims)));
  for (int64_t& size : sizes) size = draw(random, draw(random, 0, 9) == 0 ? 0 : 1, max_size);
  return sizes;
}

/// A box inside `sizes`, sometimes without elements.
inline tensor::Box draw_box(Random* random, const tensor::Dims& sizes) {
  tensor::Box box = tensor::whole(sizes);
  for (size_t d = 0; d < sizes.size(); ++d) {
    if (draw(random, 0, 2) == 0) continue;
    box.offsets[d] = draw(random, 0, sizes[d]);
    box.sizes[d] = draw(random, 0, sizes[d] - box.offsets[d]);
  }
  return box;
}

/// Calls `visit(index)` for all elements of `sizes`, row-major.
template <class Visit>
void for_each_index(const tensor::Dims& sizes, Visit&& visit) {
  for (int64_t size : sizes) {
    if (size == 0) return;
  }
  tensor::Dims index(sizes.size(), 0);
  for (;;) {
    visit(static_cast<const tensor::Dims&>(index));
    size_t d = sizes.size();
    while (d > 0 && ++index[d - 1] == sizes[d - 1]) index[--d] = 0;
    if (d == 0) return;
  }
}

inline int64_t dot(const tensor::Dims& index, const tensor::Dims& strides) {
  int64_t sum = 0;
  for (size_t d = 0; d < index.size(); ++d) sum += index[d] * strides[d];
  return sum;
}

/// Memory that holds a tensor in a random layout: dims permuted, padded, reversed or expanded.
struct RandomMemory {
  std::vector<uint8_t> bytes;
  tensor::Dims strides_bytes;
  int64_t first = 0;  // offset of the element at index 0

  uint8_t* data() { return bytes.data() + first; }
};

inline RandomMemory draw_memory(Random* random, const tensor::Dims& sizes, int64_t itemsize, bool expand) {
  RandomMemory memory;
  memory.strides_bytes.assign(sizes.size(), 0);
  std::vector<size_t> order(sizes.size());
  for (size_t d = 0; d < order.size(); ++d) order[d] = order.size() - 1 - d;  // row-major: last dim innermost
  if (draw(random, 0, 1) == 0) std::shuffle(order.begin(), order.end(), *random);
  int64_t stride = itemsize;
  for (const size_t d : order) {
    if (expand && draw(random, 0, 3) == 0) continue;  // stays 0
    stride *= draw(random, 0, 3) == 0 ? 2 : 1;
    memory.strides_bytes[d] = stride;
    stride *= std::max<int64_t>(sizes[d], 1);
    if (draw(random, 0, 5) == 0 && sizes[d] > 0) {
      memory.first += (sizes[d] - 1) * memory.strides_bytes[d];
      memory.strides_bytes[d] = -memory.strides_bytes[d];
    }
  }
  memory.bytes.resize(static_cast<size_t>(stride + itemsize));
  for (uint8_t& byte : memory.bytes) byte = static_cast<uint8_t>((*random)());
  return memory;
}

}  // namespace bytecheckpoint::test
