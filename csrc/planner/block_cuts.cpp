// SPDX-License-Identifier: Apache-2.0
#include "csrc/planner/block_cuts.h"

#include <algorithm>

#include "csrc/tensor/box.h"

namespace bytecheckpoint::planner {

base::Result<std::vector<int64_t>> block_cuts(const tensor::Dims& sizes, const std::vector<int64_t>& cuts,
                                              int64_t min_block_elements) {
  int64_t numel = 0;
  if (!tensor::checked_numel(sizes, &numel) || min_block_elements < 1 || cuts.size() < 2 || cuts.front() != 0 ||
      cuts.back() != numel || !std::is_sorted(cuts.begin(), cuts.end())) {
    return base::Status::make(base::Code::kInvalidArgument,
                              base::text("cuts of a tensor of ", tensor::to_text(sizes), " into blocks of ",
                                         min_block_elements, " elements or more must rise from 0 to ", numel));
  }
  if (numel == 0) return cuts;
  const int64_t row = sizes.empty() ? 1 : numel / sizes[0];
  const int64_t rows_a_group = (std::min(min_block_elements, numel) + row - 1) / row;
  const int64_t group = rows_a_group * row;
  std::vector<int64_t> moved = cuts;
  for (int64_t& cut : moved) {
    if (cut == 0 || cut == numel) continue;
    const int64_t before = cut / group * group;
    const int64_t after = std::min(before + group, numel);
    cut = cut - before <= after - cut ? before : after;
  }
  return moved;
}

}  // namespace bytecheckpoint::planner
