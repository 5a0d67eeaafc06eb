// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "csrc/tensor/box.h"

namespace bytecheckpoint::planner {

/// Boxes of one tensor. Each pointer leads to 2 * num_dims numbers, the offsets and then the sizes, in memory that the
/// caller keeps.
using Boxes = std::vector<const int64_t*>;

/// Says what the user can do about a save that is refused because of a gap. Goes behind the sentence that names the
/// gap.
inline constexpr std::string_view kHowToCover =
    "; save with a process group of all ranks that hold parts of the tensor, or pass "
    "Config(allow_partial_tensors=True) to the planner and the writer if only a part is meant";

/// Why boxes do not tile a tensor: two of them overlap, or some elements are in no box.
struct TilingFault {
  std::pair<size_t, size_t> overlap{0, 0};  // numbers of two boxes; equal if none overlap
  std::string gap;                          // text of find_gap; empty if there is no gap

  bool is_overlap() const { return overlap.first != overlap.second; }
};

/// Finds the first reason why `boxes` do not tile a tensor, that is, do not have each of its elements exactly once.
/// Boxes a, b and c in a tensor of 3 x 6, with both faults:
///
///     a a a b b b
///     a a * b b b      *: an overlap, in a and in c
///     . . c . . .      .: a gap, in no box
///
/// \param boxes  Each lies inside the tensor. Boxes without elements are allowed anywhere.
/// \param sizes  Of the tensor; their product fits in int64.
/// \returns nothing if the boxes tile the tensor. An overlap is reported before a gap.
/// Pure. O(n) for shards of a mesh in the order of box_order.h, O(n log n) in any order. Naming a gap costs more, and
/// happens only if there is one.
std::optional<TilingFault> find_tiling_fault(const Boxes& boxes, const tensor::Dims& sizes);

/// Describes elements of `region` that are in no box, as the begin of a sentence: `rows 128 to 255 of 256 are`, or `the
/// box at [2, 0] of [2, 3], in a tensor of [4, 6], is`.
///
/// \param boxes  Each lies inside the tensor. They may overlap one another and reach out of the region.
/// \param region  Lies inside the tensor.
/// \param max_steps  Limit of the search. If boxes overlap in so many ways that it needs more steps, it counts as a
/// gap, and the text says why.
/// \returns an empty text if the boxes cover the region.
/// Pure.
std::string find_gap(const Boxes& boxes, const tensor::Box& region, const tensor::Dims& sizes,
                     int64_t max_steps = int64_t{1} << 28);

/// Owns the numbers of many boxes, for functions that take `Boxes`. Can be reused without new allocations.
class BoxNumbers {
 public:
  /// Removes all boxes.
  void clear();
  /// \param box  Has as many dims as the other boxes.
  void add(const tensor::Box& box);
  /// Returns pointers to all boxes. They are valid until the next call of `add`, `clear` or `boxes`.
  const Boxes& boxes(size_t num_dims);

 private:
  std::vector<int64_t> numbers_;
  size_t num_boxes_ = 0;
  Boxes boxes_;
};

}  // namespace bytecheckpoint::planner
