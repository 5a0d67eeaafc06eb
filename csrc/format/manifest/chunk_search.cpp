// SPDX-License-Identifier: Apache-2.0
#include "csrc/format/manifest/chunk_search.h"

#include <algorithm>

namespace bytecheckpoint::format {
namespace {

class ChunkSearch {
 public:
  ChunkSearch(const tensor::Dims& sizes, const tensor::Box& box, const OffsetOf& offset_of)
      : sizes_(sizes), box_(box), offset_of_(offset_of) {}

  /// Searches the chunks [first, last), which begin at one place in all dims before `dim`.
  void search(size_t dim, uint32_t first, uint32_t last) {
    if (dim == box_.num_dims()) {
      for (uint32_t chunk = first; chunk < last; ++chunk) found_.push_back(chunk);
      return;
    }
    const int64_t begin = box_.offsets[dim];
    const double share = static_cast<double>(begin) / static_cast<double>(std::max<int64_t>(sizes_[dim], 1));
    const auto guess = first + static_cast<uint32_t>(share * (last - first));
    // `behind` is the first chunk that begins behind the begin of the box. The box begins in the chunks before it that
    // share one offset: the group that is found next.
    const uint32_t behind =
        find_first(first, last, guess, [&](uint32_t chunk) { return offset_of_(chunk, dim) > begin; });
    uint32_t group = first;
    if (behind > first) {
      const int64_t offset = offset_of_(behind - 1, dim);
      group = find_first(first, behind, behind - 1, [&](uint32_t chunk) { return offset_of_(chunk, dim) >= offset; });
    }
    while (group < last) {
      const int64_t offset = offset_of_(group, dim);
      if (offset >= begin + box_.sizes[dim]) return;
      const uint32_t next =
          find_first(group + 1, last, group + 1, [&](uint32_t chunk) { return offset_of_(chunk, dim) > offset; });
      search(dim + 1, group, next);
      group = next;
    }
  }

  std::vector<uint32_t> take() { return std::move(found_); }

 private:
  /// Returns the first chunk of [low, high) for which `is` is true, or `high`. `is` must then be true for all chunks
  /// behind it. Looks around `guess` first, in growing steps.
  template <class Is>
  static uint32_t find_first(uint32_t low, uint32_t high, uint32_t guess, const Is& is) {
    if (low == high) return high;
    guess = std::clamp(guess, low, high - 1);
    if (is(guess)) {
      high = guess;
      for (uint32_t step = 1; step < high - low; step *= 2) {
        if (!is(high - step)) {
          low = high - step + 1;
          break;
        }
        high -= step;
      }
    } else {
      low = guess + 1;
      for (uint32_t step = 1; step < high - low; step *= 2) {
        if (is(low + step - 1)) {
          high = low + step - 1;
          break;
        }
        low += step;
      }
    }
    while (low < high) {
      const uint32_t middle = low + (high - low) / 2;
      if (is(middle)) {
        high = middle;
      } else {
        low = middle + 1;
      }
    }
    return low;
  }

  const tensor::Dims& sizes_;
  const tensor::Box& box_;
  const OffsetOf& offset_of_;
  std::vector<uint32_t> found_;
};

}  // namespace

std::vector<uint32_t> search_overlapping(const tensor::Dims& sizes, const tensor::Box& box, uint32_t num_chunks,
                                         const OffsetOf& offset_of) {
  ChunkSearch search(sizes, box, offset_of);
  search.search(0, 0, num_chunks);
  return search.take();
}

}  // namespace bytecheckpoint::format
