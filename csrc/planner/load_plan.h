// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <vector>

#include "csrc/base/status.h"
#include "csrc/planner/wanted_blocks.h"

namespace bytecheckpoint::planner {

/// One stretch of whole blocks to read, and which wanted boxes have bytes in it.
struct ReadSegment {
  uint32_t file = 0;
  int64_t offset = 0;  // multiple of the block size
  int64_t bytes = 0;
  std::vector<uint32_t> wanted;  // indices into the plan's boxes, ascending
};

struct LoadPlan {
  std::vector<ReadSegment> segments;  // ascending by file and offset, disjoint
  int64_t bytes_wanted = 0;
  int64_t bytes_read = 0;

  int64_t num_files() const;
};

/// Turns wanted boxes into reads: every block that holds a wanted byte once, no other block, in one forward sweep a
/// file, neighbours joined up to `max_segment_bytes`.
///
/// \param block_bytes        What a CRC covers; a power of two. Reads widen to it, so that all that is read is
/// verified.
/// \param max_segment_bytes  A multiple of block_bytes.
/// \returns kInvalidArgument for a box outside its chunk.
/// Pure; O(n log n) in blocks and boxes.
base::Result<LoadPlan> plan_load(const std::vector<WantedBox>& wanted, int64_t block_bytes, int64_t max_segment_bytes);

/// Notes in each segment which boxes have bytes in it.
///
/// \param segments  Ascending by file and offset, disjoint; together they hold all wanted blocks.
void note_wanted(const WantedBlocks& blocks, std::vector<ReadSegment>* segments);

}  // namespace bytecheckpoint::planner
