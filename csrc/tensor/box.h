// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <algorithm>
#include <cstdint>
#include <string>

#include "csrc/tensor/dims.h"

namespace bytecheckpoint::tensor {

/// A box of a tensor: in every dim `d`, the `sizes[d]` elements from `offsets[d]` on. `offsets` and `sizes` have one
/// number per dim of the tensor. A scalar has no dims and one element.
struct Box {
  Dims offsets;
  Dims sizes;

  size_t num_dims() const { return sizes.size(); }
  bool operator==(const Box& other) const { return offsets == other.offsets && sizes == other.sizes; }
};

/// Computes the number of elements of a tensor of `sizes`. \returns false, and leaves `*numel` alone, if a size is
/// negative or the number exceeds int64.
bool checked_numel(const Dims& sizes, int64_t* numel);

/// Returns the box that is the whole tensor of `sizes`.
Box whole(const Dims& sizes);

/// Returns whether `box` lies inside a tensor of `sizes`, with as many dims, no negative number and no overflow. Code
/// that gets boxes from files or other ranks must check this first: all other functions rely on it.
bool is_inside(const Box& box, const Dims& sizes);

/// Whether no size of the box is 0.
inline bool has_elements(const Box& box) {
  return std::find(box.sizes.begin(), box.sizes.end(), 0) == box.sizes.end();
}

/// Computes the common part of two boxes of one tensor. \returns false, and leaves `*common` alone, if there is none. A
/// box without elements has no common part with any other.
bool intersect(const Box& a, const Box& b, Box* common);

/// Returns the strides of a row-major tensor, in elements. As in torch, a size of 0 counts as 1.
Dims row_major_strides(const Dims& sizes);

/// Returns `[2, 3]`, for messages.
std::string to_text(const Dims& dims);

}  // namespace bytecheckpoint::tensor
