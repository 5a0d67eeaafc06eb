// SPDX-License-Identifier: Apache-2.0
#include "csrc/tensor/flat_range.h"

#include <utility>

namespace bytecheckpoint::tensor {
namespace {

/// Adds the boxes of elements [begin, end) of the subtensor at `prefix`, a box of size 1 in each of its dims.
void add_boxes(const Dims& sizes, const Dims& strides, int64_t begin, int64_t end, Box prefix,
               std::vector<Box>* boxes) {
  if (begin == end) return;
  const size_t d = prefix.num_dims();
  if (d == sizes.size()) {
    boxes->push_back(std::move(prefix));
    return;
  }
  const int64_t stride = strides[d];
  const auto add_within_row = [&](int64_t row, int64_t from, int64_t to) {
    Box of_row = prefix;
    of_row.offsets.push_back(row);
    of_row.sizes.push_back(1);
    add_boxes(sizes, strides, from, to, std::move(of_row), boxes);
  };
  const int64_t first_row = begin / stride, last_row = end / stride;
  const int64_t in_first = begin % stride, in_last = end % stride;
  if (first_row == last_row) return add_within_row(first_row, in_first, in_last);

  int64_t whole_from = first_row;
  if (in_first != 0) add_within_row(whole_from++, in_first, stride);
  if (whole_from != last_row) {
    Box rows = prefix;
    rows.offsets.push_back(whole_from);
    rows.sizes.push_back(last_row - whole_from);
    for (size_t inner = d + 1; inner < sizes.size(); ++inner) {
      rows.offsets.push_back(0);
      rows.sizes.push_back(sizes[inner]);
    }
    boxes->push_back(std::move(rows));
  }
  add_within_row(last_row, 0, in_last);
}

}  // namespace

base::Result<std::vector<Box>> boxes_of_flat_range(const Dims& sizes, int64_t begin, int64_t end) {
  int64_t numel = 0;
  if (!checked_numel(sizes, &numel) || begin < 0 || begin > end || end > numel) {
    return base::Status::make(
        base::Code::kInvalidArgument,
        base::text("elements [", begin, ", ", end, ") are not all in a tensor of ", to_text(sizes)));
  }
  std::vector<Box> boxes;
  if (begin == 0 && end == numel && numel != 0) {
    boxes.push_back(whole(sizes));
  } else {
    add_boxes(sizes, row_major_strides(sizes), begin, end, {}, &boxes);
  }
  return boxes;
}

}  // namespace bytecheckpoint::tensor
