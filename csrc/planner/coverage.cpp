// SPDX-License-Identifier: Apache-2.0
#include "csrc/planner/coverage.h"

#include <algorithm>

#include "csrc/base/bytes.h"
#include "csrc/base/status.h"
#include "csrc/planner/find_overlap.h"
#include "csrc/planner/inventory.h"

namespace bytecheckpoint::planner {
namespace {

using base::text;
using tensor::Dims;

int64_t numel_of(const int64_t* sizes, size_t num_dims) {
  int64_t numel = 1;
  for (size_t d = 0; d < num_dims; ++d) numel *= sizes[d];
  return numel;
}

/// Finds out whether boxes tile a region layer by layer: the boxes of a layer have the same interval of one dim, the
/// next layer begins where it ends, and each layer is tiled in the same way in the other dims. In the order of
/// box_order.h all shards of a mesh are layers, so nearly all tensors are sharded in this way.
class Layers {
 public:
  Layers(const Boxes& boxes, const tensor::Box& region) : boxes_(boxes), num_dims_(region.num_dims()) {
    part_.insert(part_.end(), region.offsets.begin(), region.offsets.end());
    part_.insert(part_.end(), region.sizes.begin(), region.sizes.end());
  }

  /// Returns whether boxes `first` to `last - 1` tile part_. Passes over boxes without elements, except inside layers.
  /// \param dim  Dims before this one are not layers of these boxes.
  bool tile(size_t first, size_t last, size_t dim) {
    while (first < last && is_empty_box(boxes_[first], num_dims_)) ++first;
    if (first == last) return false;
    while (dim < num_dims_ && has_interval(boxes_[first], dim)) ++dim;
    if (dim == num_dims_) return last - first == 1;  // the first box fills the part
    const int64_t begin = part_[dim], size = part_[num_dims_ + dim];
    int64_t reached = begin;
    while (first < last) {
      const int64_t* box = boxes_[first];
      size_t next = first + 1;
      if (!is_empty_box(box, num_dims_)) {
        if (box[dim] != reached) return false;
        reached += box[num_dims_ + dim];
        part_[dim] = box[dim];
        part_[num_dims_ + dim] = box[num_dims_ + dim];
        while (next < last && has_interval(boxes_[next], dim)) ++next;
        if (!(next - first == 1 ? fills(box) : tile(first, next, dim + 1))) return false;
      }
      first = next;
    }
    part_[dim] = begin;
    part_[num_dims_ + dim] = size;
    return reached == begin + size;
  }

 private:
  bool has_interval(const int64_t* box, size_t d) const {
    return box[d] == part_[d] && box[num_dims_ + d] == part_[num_dims_ + d];
  }
  bool fills(const int64_t* box) const {
    for (size_t i = 0; i < 2 * num_dims_; ++i) {
      if (box[i] != part_[i]) return false;
    }
    return true;
  }

  const Boxes& boxes_;
  const size_t num_dims_;
  std::vector<int64_t> part_;  // of the region, which the boxes that are looked at must tile: offsets, then sizes
};

/// Returns true if the boxes, in their order, tile the region layer by layer. False says nothing: they may still do so
/// in another way.
bool are_layered(const Boxes& boxes, const tensor::Box& region) {
  return Layers(boxes, region).tile(0, boxes.size(), 0);
}

/// Halves the region along edges of boxes until a part lies in one box (it is covered) or meets no box (it is a gap).
class GapSearch {
 public:
  using Numbers = std::vector<size_t>;
  enum class Outcome : uint8_t { kCovered, kGap, kTooManySteps };

  GapSearch(const Boxes& boxes, size_t num_dims, int64_t max_steps)
      : boxes_(boxes), num_dims_(num_dims), steps_left_(max_steps) {}

  /// \param begin  Of the part, in each dim.
  /// \param end  Of the part, in each dim. The part has elements.
  /// \param numbers  Boxes that may meet the part.
  Outcome search(const Dims& begin, const Dims& end, const Numbers& numbers) {
    steps_left_ -= static_cast<int64_t>(numbers.size() * (num_dims_ + 1));
    if (steps_left_ < 0) return Outcome::kTooManySteps;
    Numbers inside;
    for (const size_t n : numbers) {
      if (!meets(n, begin, end, num_dims_)) continue;
      if (contains(n, begin, end)) return Outcome::kCovered;
      inside.push_back(n);
    }
    if (inside.empty()) {
      begin_ = begin;
      end_ = end;
      return Outcome::kGap;
    }
    const auto [dim, at] = choose_edge(inside, begin, end);
    Dims middle = end;
    middle[dim] = at;
    const Outcome low = search(begin, middle, inside);
    if (low != Outcome::kCovered) return low;
    middle = begin;
    middle[dim] = at;
    return search(middle, end, inside);
  }

  /// Returns the gap that was found, extended as far as it goes in the region, along the last dim first.
  tensor::Box grown(const tensor::Box& region) {
    for (size_t d = num_dims_; d-- > 0;) {
      int64_t low = region.offsets[d];
      int64_t high = region.offsets[d] + region.sizes[d];
      for (size_t n = 0; n < boxes_.size(); ++n) {
        if (!meets(n, begin_, end_, d)) continue;
        if (end_of(n, d) <= begin_[d]) low = std::max(low, end_of(n, d));
        if (begin_of(n, d) >= end_[d]) high = std::min(high, begin_of(n, d));
      }
      begin_[d] = low;
      end_[d] = high;
    }
    tensor::Box gap{begin_, end_};
    for (size_t d = 0; d < num_dims_; ++d) gap.sizes[d] -= begin_[d];
    return gap;
  }

 private:
  int64_t begin_of(size_t n, size_t d) const { return boxes_[n][d]; }
  int64_t end_of(size_t n, size_t d) const { return boxes_[n][d] + boxes_[n][num_dims_ + d]; }

  /// Returns whether a box meets the part in all dims but `skipped`. A box without elements meets nothing.
  bool meets(size_t n, const Dims& begin, const Dims& end, size_t skipped) const {
    for (size_t d = 0; d < num_dims_; ++d) {
      if (boxes_[n][num_dims_ + d] == 0) return false;
      if (d != skipped && (begin_of(n, d) >= end[d] || end_of(n, d) <= begin[d])) return false;
    }
    return true;
  }

  bool contains(size_t n, const Dims& begin, const Dims& end) const {
    for (size_t d = 0; d < num_dims_; ++d) {
      if (begin_of(n, d) > begin[d] || end_of(n, d) < end[d]) return false;
    }
    return true;
  }

  /// Returns the dim that has most edges of boxes inside the part, and the middle one of these edges. There is one,
  /// because no box contains the whole part.
  std::pair<size_t, int64_t> choose_edge(const Numbers& numbers, const Dims& begin, const Dims& end) {
    std::vector<int64_t> most, edges;
    size_t dim = 0;
    for (size_t d = 0; d < num_dims_; ++d) {
      edges.clear();
      for (const size_t n : numbers) {
        if (begin_of(n, d) > begin[d]) edges.push_back(begin_of(n, d));
        if (end_of(n, d) < end[d]) edges.push_back(end_of(n, d));
      }
      if (edges.size() <= most.size()) continue;
      most.swap(edges);
      dim = d;
    }
    const auto middle = most.begin() + static_cast<std::ptrdiff_t>(most.size() / 2);
    std::nth_element(most.begin(), middle, most.end());
    return {dim, *middle};
  }

  const Boxes& boxes_;
  const size_t num_dims_;
  int64_t steps_left_;
  Dims begin_, end_;  // the gap that was found
};

std::string text_of(const tensor::Box& gap, const Dims& sizes) {
  if (sizes.empty()) return "its only element is";
  bool has_whole_rows = true;
  for (size_t d = 1; d < sizes.size(); ++d) has_whole_rows = has_whole_rows && gap.sizes[d] == sizes[d];
  if (has_whole_rows) {
    return text("rows ", gap.offsets[0], " to ", gap.offsets[0] + gap.sizes[0] - 1, " of ", sizes[0], " are");
  }
  return text("the box at ", tensor::to_text(gap.offsets), " of ", tensor::to_text(gap.sizes), ", in a tensor of ",
              tensor::to_text(sizes), ", is");
}

}  // namespace

std::optional<TilingFault> find_tiling_fault(const Boxes& boxes, const Dims& sizes) {
  const tensor::Box region = tensor::whole(sizes);
  if (are_layered(boxes, region)) return std::nullopt;
  TilingFault fault;
  fault.overlap = find_overlap(boxes, sizes.size());
  if (fault.is_overlap()) return fault;
  // No boxes overlap and all lie inside, so the sum cannot exceed the tensor's number of elements.
  int64_t missing = numel_of(sizes.data(), sizes.size());
  for (const int64_t* box : boxes) missing -= numel_of(box + sizes.size(), sizes.size());
  if (missing == 0) return std::nullopt;
  fault.gap = find_gap(boxes, region, sizes);
  return fault;
}

std::string find_gap(const Boxes& boxes, const tensor::Box& region, const Dims& sizes, int64_t max_steps) {
  if (std::any_of(region.sizes.begin(), region.sizes.end(), [](int64_t size) { return size == 0; })) return {};
  if (are_layered(boxes, region)) return {};
  GapSearch search(boxes, sizes.size(), max_steps);
  GapSearch::Numbers all(boxes.size());
  for (size_t n = 0; n < all.size(); ++n) all[n] = n;
  Dims end = region.offsets;
  for (size_t d = 0; d < end.size(); ++d) end[d] += region.sizes[d];
  switch (search.search(region.offsets, end, all)) {
    case GapSearch::Outcome::kCovered:
      return {};
    case GapSearch::Outcome::kGap:
      return text_of(search.grown(region), sizes);
    case GapSearch::Outcome::kTooManySteps:
      break;
  }
  return text("some elements (there are ", boxes.size(), " boxes, too many to find out which) are perhaps");
}

void BoxNumbers::clear() {
  numbers_.clear();
  num_boxes_ = 0;
}

void BoxNumbers::add(const tensor::Box& box) {
  numbers_.insert(numbers_.end(), box.offsets.begin(), box.offsets.end());
  numbers_.insert(numbers_.end(), box.sizes.begin(), box.sizes.end());
  ++num_boxes_;
}

const Boxes& BoxNumbers::boxes(size_t num_dims) {
  boxes_.resize(num_boxes_);
  for (size_t b = 0; b < num_boxes_; ++b) boxes_[b] = numbers_.data() + 2 * num_dims * b;
  return boxes_;
}

}  // namespace bytecheckpoint::planner
