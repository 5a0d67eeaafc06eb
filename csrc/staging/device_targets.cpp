// SPDX-License-Identifier: Apache-2.0
#include "csrc/staging/device_targets.h"

#include <algorithm>
#include <tuple>
#include <utility>

namespace bytecheckpoint::staging {
namespace {

/// Whether two elements may share memory.
bool overlaps_itself(const tensor::StridedView& view) {
  std::vector<std::pair<int64_t, int64_t>> dims;  // stride and size
  for (size_t d = 0; d < view.sizes.size(); ++d) {
    if (view.sizes[d] == 0) return false;
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

void DeviceTargets::add(size_t number, TensorMemory part, const std::string& tensor, const TensorMemory& whole) {
  const auto [known, is_new] = known_.try_emplace(tensor, ranges_.size());
  if (is_new) ranges_.push_back({whole.device, nullptr, nullptr, false});
  Range& range = ranges_[known->second];
  if (const int64_t span = tensor::span_bytes(whole.view); span > 0) {
    const uint8_t* const first = whole.view.data;
    range.first = range.first == nullptr ? first : std::min(range.first, first);
    range.behind = std::max(range.behind, first + span);
  }
  range.is_shared = range.is_shared || overlaps_itself(whole.view);
  tensors_.push_back(known->second);
  parts_.push_back({number, std::move(part)});
}

std::vector<DeviceTargets::Part> DeviceTargets::take_apart(std::vector<size_t>* left_out) {
  std::vector<Range*> ordered;
  for (Range& range : ranges_) ordered.push_back(&range);
  std::sort(ordered.begin(), ordered.end(), [](const Range* a, const Range* b) {
    return std::tie(a->device, a->first) < std::tie(b->device, b->first);
  });
  Range* furthest = nullptr;  // of those before on the same device, the one that ends last
  for (Range* range : ordered) {
    const bool is_of_device = furthest != nullptr && furthest->device == range->device;
    if (is_of_device && range->first < furthest->behind) furthest->is_shared = range->is_shared = true;
    if (!is_of_device || range->behind > furthest->behind) furthest = range;
  }
  std::vector<Part> apart;
  for (size_t p = 0; p < parts_.size(); ++p) {
    if (ranges_[tensors_[p]].is_shared) {
      left_out->push_back(parts_[p].number);
    } else {
      apart.push_back(std::move(parts_[p]));
    }
  }
  *this = {};
  return apart;
}

}  // namespace bytecheckpoint::staging
