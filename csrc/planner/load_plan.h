// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <vector>

#include "csrc/base/status.h"
#include "csrc/planner/wanted_blocks.h"

namespace bytecheckpoint::planner {

/// One range of whole blocks to read, and the wanted boxes that have bytes in it.
struct ReadSegment {
  uint32_t file = 0;
  int64_t offset = 0;  // a multiple of the block size, and so is `bytes`
  int64_t bytes = 0;
  std::vector<uint32_t> wanted;  // indices into the plan's boxes, ascending
};

/// The reads of one load.
struct LoadPlan {
  std::vector<ReadSegment> segments;  // ascending by file and offset; they do not overlap
  int64_t bytes_wanted = 0;
  int64_t bytes_read = 0;

  /// Returns from how many files the plan reads.
  int64_t num_files() const;
};

/// Turns wanted boxes into reads: each block that holds a wanted byte is read once, and each file is read in one
/// forward sweep. Neighbouring blocks become one segment of at most `max_segment_bytes`. No other block is read, except
/// in gaps of up to `max_gap_bytes`, where that costs less time than another request.
///
///     blocks     |     0     |     1     |     2     |     3     |
///     boxes          [a]  [b]    [c]                    [ d ]
///     segments   [------- a, b, c -------]           [---- d ----]
///
/// \param block_bytes  Size of the blocks that have a CRC each; a power of two. Reads are widened to whole blocks, so
/// that all bytes that are read can be verified.
/// \param max_segment_bytes  A multiple of block_bytes.
/// \param max_gap_bytes  0: what is between wanted blocks is not read.
/// Pure; O(n log n) in blocks and boxes.
LoadPlan plan_load(const std::vector<WantedBox>& wanted, int64_t block_bytes, int64_t max_segment_bytes,
                   int64_t max_gap_bytes = 0);

/// Enters in each segment which boxes have bytes in it.
///
/// \param segments  Ascending by file and offset, without overlap; together they contain all wanted blocks.
void note_wanted(const WantedBlocks& blocks, std::vector<ReadSegment>* segments);

}  // namespace bytecheckpoint::planner
