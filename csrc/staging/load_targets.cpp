// SPDX-License-Identifier: Apache-2.0
#include "csrc/staging/load_targets.h"

#include <algorithm>
#include <iterator>
#include <tuple>
#include <utility>

namespace bytecheckpoint::staging {
namespace {

/// Whether two elements may share memory.
bool overlaps_itself(const tensor::StridedView& view) {
  if (tensor::is_row_major(view)) return false;
  std::vector<std::pair<int64_t, int64_t>> dims;  // stride and size
  for (size_t d = 0; d < view.sizes.size(); ++d) {
    if (view.sizes[d] > 1) dims.emplace_back(view.strides_bytes[d], view.sizes[d]);
  }
  std::sort(dims.begin(), dims.end());
  int64_t extent = tensor::find_dtype(view.dtype)->itemsize_bytes;
  for (const auto& [stride, size] : dims) {
    if (stride < extent) return true;
    extent += (size - 1) * stride;
  }
  return false;
}

}  // namespace

LoadTargets::Range& LoadTargets::range_of(size_t tensor, const TensorMemory& whole) {
  if (tensor == ranges_.size()) ranges_.push_back({tensor, whole.device, nullptr, nullptr, false});
  Range& range = ranges_[tensor];
  if (const int64_t span = tensor::span_bytes(whole.view); span > 0) {
    const uint8_t* const first = whole.view.data;
    range.first = range.first == nullptr ? first : std::min(range.first, first);
    range.behind = std::max(range.behind, first + span);
  }
  return range;
}

void LoadTargets::add(size_t number, TensorMemory part, size_t tensor, const TensorMemory& whole) {
  range_of(tensor, whole).is_left_out |= overlaps_itself(whole.view);
  tensors_.push_back(tensor);
  parts_.push_back({number, std::move(part)});
}

void LoadTargets::leave_out(size_t number, size_t tensor, const TensorMemory& whole) {
  range_of(tensor, whole);
  left_out_.push_back(number);
}

void LoadTargets::find_shared() {
  std::vector<Range> ordered;
  std::copy_if(ranges_.begin(), ranges_.end(), std::back_inserter(ordered),
               [](const Range& range) { return range.first != range.behind; });
  std::sort(ordered.begin(), ordered.end(),
            [](const Range& a, const Range& b) { return std::tie(a.device, a.first) < std::tie(b.device, b.first); });
  for (auto group = ordered.begin(); group != ordered.end();) {
    const uint8_t* behind = group->behind;
    auto end = group + 1;
    for (; end != ordered.end() && end->device == group->device && end->first < behind; ++end) {
      behind = std::max(behind, end->behind);
    }
    const auto is_earlier = [](const Range& a, const Range& b) { return a.tensor < b.tensor; };
    const size_t earliest = std::min_element(group, end, is_earlier)->tensor;
    for (; group != end; ++group) ranges_[group->tensor].is_left_out |= group->tensor != earliest;
  }
}

std::vector<LoadTargets::Part> LoadTargets::take_apart(std::vector<size_t>* left_out) {
  find_shared();
  std::vector<Part> apart;
  left_out->insert(left_out->end(), left_out_.begin(), left_out_.end());
  for (size_t p = 0; p < parts_.size(); ++p) {
    if (ranges_[tensors_[p]].is_left_out) {
      left_out->push_back(parts_[p].number);
    } else {
      apart.push_back(std::move(parts_[p]));
    }
  }
  *this = {};
  return apart;
}

}  // namespace bytecheckpoint::staging
