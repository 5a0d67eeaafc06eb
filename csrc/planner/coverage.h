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

/// Boxes of one tensor: offsets, then sizes, of each; 2 * num_dims numbers, wherever they lie.
using Boxes = std::vector<const int64_t*>;

/// Of a save that is refused because of a gap: what to do. Goes behind the sentence that names the gap.
inline constexpr std::string_view kHowToCover =
    "; save with a process group of all ranks that hold parts of the tensor, or pass "
    "Config(allow_partial_tensors=True) to the planner and the writer if only a part is meant";

/// What keeps boxes from tiling a tensor: two of them overlap, or elements are in none.
struct TilingFault {
  std::pair<size_t, size_t> overlap{0, 0};  // equal numbers: none overlap
  std::string gap;                          // as of find_gap; empty: there is none

  bool is_overlap() const { return overlap.first != overlap.second; }
};

/// The first fault of boxes that shall have each element of a tensor once; nothing if they do.
///
/// \param boxes  All inside the tensor. Those without elements are no fault.
/// \param sizes  Of the tensor; their product fits in int64.
/// Pure; O(n) for shards along one dim in their order, O(n log n) for those of any mesh. Where a gap is costs more, and
/// is looked for only if there is one.
std::optional<TilingFault> find_tiling_fault(const Boxes& boxes, const tensor::Dims& sizes);

/// Elements of `region` that are in none of the boxes, as the begin of a sentence: `rows 128 to 255 of 256 are`, or
/// `the box at [2, 0] of [2, 3], in a tensor of [4, 6], is`. Empty if there are none.
///
/// \param boxes   Inside the tensor. They may overlap one another, and reach out of the region.
/// \param region  Inside the tensor.
/// Pure. Boxes that overlap in so many ways that it takes more than `max_steps` count as a gap, and the text says why.
std::string find_gap(const Boxes& boxes, const tensor::Box& region, const tensor::Dims& sizes,
                     int64_t max_steps = int64_t{1} << 28);

/// The numbers of many boxes, for `Boxes`.
class BoxNumbers {
 public:
  /// Forgets the boxes.
  void clear();
  void add(const tensor::Box& box);
  /// Valid until the next change.
  const Boxes& boxes(size_t num_dims);

 private:
  std::vector<int64_t> numbers_;
  size_t num_boxes_ = 0;
  Boxes boxes_;
};

}  // namespace bytecheckpoint::planner
