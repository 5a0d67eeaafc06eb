// SPDX-License-Identifier: Apache-2.0
#include "csrc/planner/load_plan.h"

#include <algorithm>
#include <utility>

namespace bytecheckpoint::planner {

int64_t LoadPlan::num_files() const {
  int64_t count = 0;
  for (size_t s = 0; s < segments.size(); ++s) {
    if (s == 0 || segments[s - 1].file != segments[s].file) ++count;
  }
  return count;
}

namespace {

/// Joins ranges of one file with a gap of up to `max_gap_bytes` between them.
std::vector<BlockRange> joined(const std::vector<BlockRange>& ranges, int64_t max_gap_bytes) {
  std::vector<BlockRange> out;
  for (const BlockRange& range : ranges) {
    if (!out.empty() && out.back().file == range.file && range.begin - out.back().end <= max_gap_bytes) {
      out.back().end = range.end;
    } else {
      out.push_back(range);
    }
  }
  return out;
}

}  // namespace

LoadPlan plan_load(const std::vector<WantedBox>& wanted, int64_t block_bytes, int64_t max_segment_bytes,
                   int64_t max_gap_bytes) {
  const WantedBlocks blocks = find_wanted_blocks(wanted, block_bytes);
  LoadPlan plan;
  plan.bytes_wanted = blocks.bytes_wanted;
  for (const BlockRange& range : joined(blocks.merged(), max_gap_bytes)) {
    for (int64_t begin = range.begin; begin < range.end; begin += max_segment_bytes) {
      plan.segments.push_back({range.file, begin, std::min(range.end - begin, max_segment_bytes), {}});
    }
    plan.bytes_read += range.end - range.begin;
  }
  note_wanted(blocks, &plan.segments);
  return plan;
}

void note_wanted(const WantedBlocks& blocks, std::vector<ReadSegment>* segments) {
  // Ranges ascend by their begin, so the first segment of a range never stands before that of the range before it.
  auto first = segments->begin();
  for (const WantedBlocks::OfBox& of_box : blocks.ranges) {
    const BlockRange& range = of_box.range;
    const auto is_before = [&](const ReadSegment& segment) {
      return std::pair(segment.file, segment.offset + segment.bytes) <= std::pair(range.file, range.begin);
    };
    while (first != segments->end() && is_before(*first)) ++first;
    for (auto segment = first; segment != segments->end() && segment->file == range.file && segment->offset < range.end;
         ++segment) {
      segment->wanted.push_back(of_box.box);
    }
  }
  for (ReadSegment& segment : *segments) {
    std::sort(segment.wanted.begin(), segment.wanted.end());
    segment.wanted.erase(std::unique(segment.wanted.begin(), segment.wanted.end()), segment.wanted.end());
  }
}

}  // namespace bytecheckpoint::planner
