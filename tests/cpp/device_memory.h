// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstring>
#include <utility>
#include <vector>

#include "csrc/tensor/dtype.h"
#include "csrc/tensor/strided_view.h"
#include "tests/cpp/random_box.h"

namespace bytecheckpoint::test {

inline tensor::DType dtype_of(int64_t itemsize) {
  switch (itemsize) {
    case 1:
      return tensor::DType::kInt8;
    case 2:
      return tensor::DType::kBFloat16;
    case 4:
      return tensor::DType::kFloat32;
    case 8:
      return tensor::DType::kFloat64;
    default:
      return tensor::DType::kComplex128;
  }
}

/// A tensor of random bytes in a random layout, as a device would hold it. The memory around it begins at a chosen
/// remainder of 16. Copying element by element gives its bytes in row-major order.
class SampleTensor {
 public:
  SampleTensor(Random* random, const tensor::Dims& sizes, int64_t itemsize, bool expand)
      : itemsize_(itemsize), memory_(draw_memory(random, sizes, itemsize, expand)) {
    // Slicing keeps elements around the tensor that are not its own, as canaries.
    const int64_t shift = draw(random, 0, 2) == 0 ? draw(random, 0, 15) : 0;
    const int64_t room = static_cast<int64_t>(memory_.bytes.size());
    block_.resize(static_cast<size_t>(room + 64));
    const auto address = static_cast<int64_t>(reinterpret_cast<uintptr_t>(block_.data()));
    begin_ = (16 - address % 16) % 16 + 16 + shift;
    for (uint8_t& byte : block_) byte = static_cast<uint8_t>((*random)());
    view_ = {block_.data() + begin_ + memory_.first, dtype_of(itemsize), sizes, memory_.strides_bytes};
  }
  SampleTensor(SampleTensor&&) = default;
  SampleTensor(const SampleTensor&) = delete;

  const tensor::StridedView& view() const { return view_; }
  const std::vector<uint8_t>& block() const { return block_; }

  std::vector<uint8_t> packed() const {
    std::vector<uint8_t> packed;
    for_each_index(view_.sizes, [&](const tensor::Dims& index) {
      const uint8_t* element = view_.data + dot(index, view_.strides_bytes);
      packed.insert(packed.end(), element, element + itemsize_);
    });
    return packed;
  }

  /// The expected content of the whole block once `packed` is the tensor's content.
  std::vector<uint8_t> block_with(const std::vector<uint8_t>& packed) const {
    std::vector<uint8_t> block = block_;
    const uint8_t* next = packed.data();
    for_each_index(view_.sizes, [&](const tensor::Dims& index) {
      std::memcpy(block.data() + begin_ + memory_.first + dot(index, view_.strides_bytes), next,
                  static_cast<size_t>(itemsize_));
      next += itemsize_;
    });
    return block;
  }

 private:
  int64_t itemsize_;
  RandomMemory memory_;  // its bytes are not used
  std::vector<uint8_t> block_;
  int64_t begin_ = 0;
  tensor::StridedView view_;
};

inline std::vector<uint8_t> random_bytes(Random* random, size_t count) {
  std::vector<uint8_t> bytes(count);
  for (uint8_t& byte : bytes) byte = static_cast<uint8_t>((*random)());
  return bytes;
}

}  // namespace bytecheckpoint::test
