// SPDX-License-Identifier: Apache-2.0
#include "csrc/planner/load_plan.h"

#include <algorithm>

#include "csrc/base/bytes.h"
#include "csrc/tensor/strided_view.h"

namespace bytecheckpoint::planner {
namespace {

/// Whole blocks [begin, end), in bytes of the file, wanted by one box.
struct BlockRange {
  uint32_t file;
  int64_t begin;
  int64_t end;
  uint32_t wanted;
};

/// Skips from block to block, not from run to run: a narrow column of a long tensor costs one step a block.
void append_block_ranges(const WantedBox& wanted, uint32_t index, int64_t block_bytes, std::vector<BlockRange>* out) {
  const tensor::Dims strides = tensor::row_major_strides(wanted.chunk_sizes);
  tensor::Dims strides_bytes(strides.size());
  for (size_t d = 0; d < strides.size(); ++d) strides_bytes[d] = strides[d] * wanted.itemsize_bytes;
  const tensor::BoxRuns runs(wanted.chunk_sizes, wanted.box, wanted.itemsize_bytes, strides_bytes);
  const size_t first = out->size();
  for (int64_t run = 0; run < runs.num_runs();) {
    const int64_t from = wanted.data_offset + runs.chunk_offset(run);
    const BlockRange range{wanted.file, base::align_down(from, block_bytes),
                           base::align_up(from + runs.run_bytes(), block_bytes), index};
    if (out->size() > first && out->back().end >= range.begin) {
      out->back().end = range.end;
    } else {
      out->push_back(range);
    }
    run = runs.first_run_ending_after(range.end - wanted.data_offset);
  }
}

/// Joins ranges of one file (sorted by begin) into segments and notes in each which boxes it serves.
std::vector<ReadSegment> segments_of(const std::vector<BlockRange>& ranges, size_t first, size_t last,
                                     int64_t max_segment_bytes) {
  std::vector<ReadSegment> segments;
  for (size_t r = first; r < last; ++r) {
    int64_t covered = segments.empty() ? -1 : segments.back().offset + segments.back().bytes;
    for (int64_t begin = std::max(ranges[r].begin, covered); begin < ranges[r].end;) {
      int64_t take = std::min(ranges[r].end - begin, max_segment_bytes);
      if (begin == covered && segments.back().bytes < max_segment_bytes) {
        take = std::min(take, max_segment_bytes - segments.back().bytes);
        segments.back().bytes += take;
      } else {
        segments.push_back(ReadSegment{begin, take, {}});
      }
      begin += take;
      covered = begin;
    }
  }
  for (size_t r = first; r < last; ++r) {
    auto segment = std::upper_bound(segments.begin(), segments.end(), ranges[r].begin,
                                    [](int64_t offset, const ReadSegment& s) { return offset < s.offset + s.bytes; });
    for (; segment != segments.end() && segment->offset < ranges[r].end; ++segment) {
      segment->wanted.push_back(ranges[r].wanted);
    }
  }
  for (ReadSegment& segment : segments) {
    std::sort(segment.wanted.begin(), segment.wanted.end());
    segment.wanted.erase(std::unique(segment.wanted.begin(), segment.wanted.end()), segment.wanted.end());
  }
  return segments;
}

}  // namespace

base::Result<LoadPlan> plan_load(const std::vector<WantedBox>& wanted, int64_t block_bytes, int64_t max_segment_bytes) {
  LoadPlan plan;
  std::vector<BlockRange> ranges;
  for (uint32_t i = 0; i < wanted.size(); ++i) {
    if (!tensor::is_inside(wanted[i].box, wanted[i].chunk_sizes)) {
      return base::Status::make(base::Code::kInvalidArgument,
                                base::text("wanted box at ", tensor::to_text(wanted[i].box.offsets), " of ",
                                           tensor::to_text(wanted[i].box.sizes), " is not inside a chunk of shape ",
                                           tensor::to_text(wanted[i].chunk_sizes)));
    }
    append_block_ranges(wanted[i], i, block_bytes, &ranges);
    int64_t numel = 0;
    (void)tensor::checked_numel(wanted[i].box.sizes, &numel);
    plan.bytes_wanted += numel * wanted[i].itemsize_bytes;
  }
  std::sort(ranges.begin(), ranges.end(), [](const BlockRange& a, const BlockRange& b) {
    return a.file != b.file ? a.file < b.file : a.begin < b.begin;
  });
  for (size_t first = 0; first < ranges.size();) {
    size_t last = first;
    while (last < ranges.size() && ranges[last].file == ranges[first].file) ++last;
    FileReads& reads = plan.files.emplace_back();
    reads.file = ranges[first].file;
    reads.segments = segments_of(ranges, first, last, max_segment_bytes);
    for (const ReadSegment& segment : reads.segments) plan.bytes_read += segment.bytes;
    first = last;
  }
  return plan;
}

}  // namespace bytecheckpoint::planner
