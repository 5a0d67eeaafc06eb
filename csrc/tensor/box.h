// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <string>

#include "csrc/tensor/dims.h"

namespace bytecheckpoint::tensor {

/// A box of a tensor: `sizes[d]` elements from `offsets[d]` on, in every dim. A scalar has no dims and one element.
struct Box {
  Dims offsets;
  Dims sizes;

  size_t num_dims() const { return sizes.size(); }
  bool operator==(const Box& other) const { return offsets == other.offsets && sizes == other.sizes; }
};

/// Elements of `sizes`; false on a negative size or overflow of int64.
bool checked_numel(const Dims& sizes, int64_t* numel);

/// The whole of a tensor of `sizes`.
Box whole(const Dims& sizes);

/// Is `box` well-formed (equal ranks, nothing negative, no overflow) and inside a tensor of `sizes`?
bool is_inside(const Box& box, const Dims& sizes);

/// Common part of two boxes of one tensor; false if there is none (an empty box overlaps nothing).
bool intersect(const Box& a, const Box& b, Box* common);

/// Strides of a row-major tensor in elements, as torch gives them: a size of 0 counts as 1.
Dims row_major_strides(const Dims& sizes);

/// `[2, 3]`, for messages.
std::string to_text(const Dims& dims);

}  // namespace bytecheckpoint::tensor
