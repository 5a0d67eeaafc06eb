// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "csrc/base/status.h"
#include "csrc/tensor/box.h"

namespace bytecheckpoint::planner {

/// One box wanted of one stored chunk. A record that is wanted whole (bytes) is a chunk of one dim of bytes.
struct WantedBox {
  uint32_t file = 0;
  int64_t data_offset = 0;  // of the chunk's first element in its file
  tensor::Dims chunk_sizes;
  tensor::Box box;  // inside the chunk
  int64_t itemsize_bytes = 1;
};

/// Whole blocks of one file, in bytes: both ends are multiples of the block size.
struct BlockRange {
  uint32_t file = 0;
  int64_t begin = 0;
  int64_t end = 0;

  bool operator==(const BlockRange& other) const {
    return file == other.file && begin == other.begin && end == other.end;
  }
};

/// The blocks that hold bytes of boxes, and of which boxes.
struct WantedBlocks {
  struct OfBox {
    BlockRange range;
    uint32_t box;  // index into the boxes
  };
  std::vector<OfBox> ranges;  // ascending by file and begin; those of different boxes overlap
  int64_t bytes_wanted = 0;   // of the boxes themselves

  /// The same blocks, each once: ascending, disjoint, neighbours joined.
  std::vector<BlockRange> merged() const;
};

/// \param block_bytes  What a CRC covers; a power of two.
/// \returns kInvalidArgument for a box outside its chunk.
/// Pure; O(n log n) in blocks and boxes.
base::Result<WantedBlocks> find_wanted_blocks(const std::vector<WantedBox>& wanted, int64_t block_bytes);

/// Merged ranges as a few bytes each, for other ranks.
std::string encode_ranges(const std::vector<BlockRange>& merged, int64_t block_bytes);

/// The ranges again; none of no bytes. \returns kCorrupt for what `encode_ranges` does not make of merged ranges.
base::Result<std::vector<BlockRange>> decode_ranges(std::string_view bytes, int64_t block_bytes);

}  // namespace bytecheckpoint::planner
