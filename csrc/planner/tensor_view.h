// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <vector>

#include "csrc/base/status.h"
#include "csrc/tensor/box.h"

namespace bytecheckpoint::planner {

/// A box of a tensor that is made of others, and where its elements are in one stored record, whose elements are
/// row-major.
struct ViewedBox {
  tensor::Box box;
  uint32_t source = 0;   // number of the record; the caller knows which one that is
  int64_t offset = 0;    // of the box's first element, in elements from the first one of the record
  tensor::Dims strides;  // of each dim of the box, in elements of the record; of a dim of one element any number
};

/// A tensor that is put together from boxes of stored records. No element moves: only the description changes, so a
/// load reads what it wants from where it is.
///
///     experts.0.w [2, 3] -+
///     experts.1.w [2, 3] -+- stack -> experts.w [3, 2, 3] - permute -> [3, 3, 2] - slice -> [2, 3, 2]
///     experts.2.w [2, 3] -+
///
/// The operations are torch's: `narrow`, `cat`, `stack`, `permute` and `reshape`. All are pure, and take time and
/// memory in proportion to the boxes. They fail with kInvalidArgument where torch's would.
struct TensorView {
  tensor::Dims sizes;
  std::vector<ViewedBox> boxes;
};

/// The most boxes that a view may have. `reshape` may cut a box into many.
inline constexpr size_t kMostViewedBoxes = 1 << 22;

/// Returns elements [begin, begin + length) of one dim.
base::Result<TensorView> narrow(TensorView view, size_t dim, int64_t begin, int64_t length);
/// Returns the tensor with `dim` as long as `size`: behind the elements that there are come some that are in no box.
base::Result<TensorView> pad(TensorView view, size_t dim, int64_t size);
/// Joins tensors that differ in the size of one dim at most.
base::Result<TensorView> concatenate(const std::vector<TensorView>& views, size_t dim);
/// Joins tensors of one shape along a new dim, which becomes dim `dim`.
base::Result<TensorView> stack(const std::vector<TensorView>& views, size_t dim);
/// Returns the tensor whose dim `d` is dim `dims[d]` of `view`.
base::Result<TensorView> permute(TensorView view, const std::vector<size_t>& dims);
/// Returns the tensor with the same elements in row-major order and another shape. Where dims are joined of which a box
/// has only a part, the box is cut. \returns kUnsupported for more than kMostViewedBoxes boxes.
base::Result<TensorView> reshape(const TensorView& view, const tensor::Dims& sizes);

/// Tells where a box is in a record whose elements are not row-major, but have `record_strides`.
///
/// \param record_sizes    Shape of the record.
/// \param record_strides  Of the elements as they are stored, in elements.
/// \returns false if the box joins dims of the record that are not neighbours as it is stored.
bool restride(const tensor::Dims& record_sizes, const tensor::Dims& record_strides, ViewedBox* viewed);

}  // namespace bytecheckpoint::planner
