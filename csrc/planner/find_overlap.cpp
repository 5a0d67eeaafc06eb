// SPDX-License-Identifier: Apache-2.0
#include "csrc/planner/find_overlap.h"

#include <algorithm>
#include <numeric>
#include <set>

namespace bytecheckpoint::planner {
namespace {

constexpr std::pair<size_t, size_t> kNoOverlap{0, 0};

/// Looks for an overlap dim by dim.
///
/// Shards of a mesh form layers along each dim in which they are cut: groups of boxes that have the same interval, one
/// group behind the other. Boxes of different layers cannot meet. Boxes of one layer meet if they meet in the remaining
/// dims. Boxes that are not layered are swept.
class OverlapSearch {
 public:
  using Numbers = std::vector<size_t>;

  OverlapSearch(const std::vector<const int64_t*>& boxes, size_t num_dims) : boxes_(boxes), num_dims_(num_dims) {}

  /// \param dims  The dims in which the boxes may differ; in all others they have the same interval.
  std::pair<size_t, size_t> search(Numbers numbers, std::vector<size_t> dims) const {
    if (numbers.size() < 2) return kNoOverlap;
    dims.erase(std::remove_if(dims.begin(), dims.end(), [&](size_t d) { return has_one_interval(numbers, d); }),
               dims.end());
    if (dims.empty()) return {numbers[0], numbers[1]};
    for (size_t i = 0; i < dims.size(); ++i) {
      sort_along(dims[i], &numbers);
      if (dims.size() > 1 && !is_layered(numbers, dims[i])) continue;
      std::vector<size_t> rest = dims;
      rest.erase(rest.begin() + static_cast<std::ptrdiff_t>(i));
      return search_layers(numbers, dims[i], rest);
    }
    return dims.size() == 2 ? sweep_intervals(std::move(numbers), dims[0], dims[1])
                            : sweep(std::move(numbers), dims[0]);
  }

 private:
  int64_t begin(size_t number, size_t dim) const { return boxes_[number][dim]; }
  int64_t end(size_t number, size_t dim) const { return boxes_[number][dim] + boxes_[number][num_dims_ + dim]; }

  bool has_one_interval(const Numbers& numbers, size_t dim) const {
    return std::all_of(numbers.begin(), numbers.end(), [&](size_t n) {
      return begin(n, dim) == begin(numbers[0], dim) && end(n, dim) == end(numbers[0], dim);
    });
  }

  void sort_along(size_t dim, Numbers* numbers) const {
    const auto is_before = [&](size_t a, size_t b) {
      return begin(a, dim) != begin(b, dim) ? begin(a, dim) < begin(b, dim) : end(a, dim) < end(b, dim);
    };
    if (!std::is_sorted(numbers->begin(), numbers->end(), is_before)) {
      std::stable_sort(numbers->begin(), numbers->end(), is_before);
    }
  }

  bool is_layered(const Numbers& sorted, size_t dim) const {
    for (size_t i = 1; i < sorted.size(); ++i) {
      const size_t a = sorted[i - 1];
      const size_t b = sorted[i];
      const bool is_same = begin(a, dim) == begin(b, dim) && end(a, dim) == end(b, dim);
      if (!is_same && begin(b, dim) < end(a, dim)) return false;
    }
    return true;
  }

  std::pair<size_t, size_t> search_layers(const Numbers& sorted, size_t dim, const std::vector<size_t>& rest) const {
    for (size_t first = 0; first < sorted.size();) {
      size_t last = first + 1;
      while (last < sorted.size() && begin(sorted[last], dim) == begin(sorted[first], dim) &&
             end(sorted[last], dim) == end(sorted[first], dim)) {
        ++last;
      }
      // Layers can reach into one another only if this is the last dim: `search` asked is_layered for all others.
      if (last < sorted.size() && begin(sorted[last], dim) < end(sorted[first], dim)) {
        return {sorted[first], sorted[last]};
      }
      if (last - first > 1) {
        const auto from = sorted.begin() + static_cast<std::ptrdiff_t>(first);
        const auto found = search(Numbers(from, sorted.begin() + static_cast<std::ptrdiff_t>(last)), rest);
        if (found.first != found.second) return found;
      }
      first = last;
    }
    return kNoOverlap;
  }

  /// Sweeps along dim `a`. As long as no boxes overlap, those under the line are disjoint intervals of dim `b`, so a
  /// new one has to be compared only with its neighbours.
  std::pair<size_t, size_t> sweep_intervals(Numbers numbers, size_t a, size_t b) const {
    sort_along(a, &numbers);
    Numbers by_end = numbers;
    std::sort(by_end.begin(), by_end.end(), [&](size_t x, size_t y) { return end(x, a) < end(y, a); });
    std::set<std::pair<int64_t, size_t>> under_line;  // (begin along b, number)
    size_t left = 0;
    for (const size_t number : numbers) {
      for (; end(by_end[left], a) <= begin(number, a); ++left) under_line.erase({begin(by_end[left], b), by_end[left]});
      const auto next = under_line.lower_bound({begin(number, b), 0});
      if (next != under_line.end() && next->first < end(number, b)) return {next->second, number};
      if (next != under_line.begin()) {
        const size_t before = std::prev(next)->second;
        if (end(before, b) > begin(number, b)) return {before, number};
      }
      under_line.emplace(begin(number, b), number);
    }
    return kNoOverlap;
  }

  /// Sweeps along `dim` in more dims, and compares each box with all under the line. Slow, but no mesh makes such
  /// boxes.
  std::pair<size_t, size_t> sweep(Numbers numbers, size_t dim) const {
    sort_along(dim, &numbers);
    Numbers under_line;
    for (const size_t number : numbers) {
      under_line.erase(std::remove_if(under_line.begin(), under_line.end(),
                                      [&](size_t n) { return end(n, dim) <= begin(number, dim); }),
                       under_line.end());
      for (const size_t other : under_line) {
        if (overlap(other, number)) return {other, number};
      }
      under_line.push_back(number);
    }
    return kNoOverlap;
  }

  bool overlap(size_t a, size_t b) const {
    for (size_t d = 0; d < num_dims_; ++d) {
      if (begin(a, d) >= end(b, d) || begin(b, d) >= end(a, d)) return false;
    }
    return true;
  }

  const std::vector<const int64_t*>& boxes_;
  const size_t num_dims_;
};

}  // namespace

std::pair<size_t, size_t> find_overlap(const std::vector<const int64_t*>& boxes, size_t num_dims) {
  OverlapSearch::Numbers numbers;
  numbers.reserve(boxes.size());
  for (size_t i = 0; i < boxes.size(); ++i) {
    const bool is_empty = std::any_of(boxes[i] + num_dims, boxes[i] + 2 * num_dims, [](int64_t s) { return s == 0; });
    if (!is_empty) numbers.push_back(i);
  }
  std::vector<size_t> dims(num_dims);
  std::iota(dims.begin(), dims.end(), 0);
  return OverlapSearch(boxes, num_dims).search(std::move(numbers), std::move(dims));
}

}  // namespace bytecheckpoint::planner
