// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "csrc/base/status.h"
#include "csrc/tensor/box.h"

namespace bytecheckpoint::planner {

/// A box that a load wants of one stored chunk: elements of a file, evenly spaced in each dim. A record that is wanted
/// whole, as bytes, is a box of one dim whose elements are bytes.
struct WantedBox {
  uint32_t file = 0;
  int64_t offset = 0;          // of the first element, in its file
  tensor::Dims sizes;          // elements
  tensor::Dims strides_bytes;  // descending; each is at least as long as what the dims behind it span
  int64_t itemsize_bytes = 1;
};

/// Describes a box of a chunk whose elements are row-major.
/// \param data_offset  Of the chunk's first element in its file. \param box  Inside the chunk.
/// \returns kInvalidArgument for a box outside its chunk.
base::Result<WantedBox> wanted_of_chunk(uint32_t file, int64_t data_offset, const tensor::Dims& chunk_sizes,
                                        const tensor::Box& box, int64_t itemsize_bytes);

/// A range of whole blocks of one file, in bytes: `begin` and `end` are multiples of the block size.
struct BlockRange {
  uint32_t file = 0;
  int64_t begin = 0;
  int64_t end = 0;

  bool operator==(const BlockRange& other) const {
    return file == other.file && begin == other.begin && end == other.end;
  }
};

/// The blocks that hold bytes of wanted boxes, and of which boxes.
struct WantedBlocks {
  struct OfBox {
    BlockRange range;
    uint32_t box;  // index into the wanted boxes
  };
  std::vector<OfBox> ranges;  // ascending by file and begin; ranges of different boxes may overlap
  int64_t bytes_wanted = 0;   // of the elements of the boxes

  /// Returns the same blocks, each once: ascending ranges that neither overlap nor touch.
  std::vector<BlockRange> merged() const;
};

/// Finds all blocks that hold bytes of the boxes.
///
/// \param block_bytes  Size of the blocks that have a CRC each; a power of two.
/// Pure; O(n log n) in blocks and boxes.
WantedBlocks find_wanted_blocks(const std::vector<WantedBox>& wanted, int64_t block_bytes);

/// Encodes merged ranges in a few bytes each, to be sent to other ranks.
std::string encode_ranges(const std::vector<BlockRange>& merged, int64_t block_bytes);

/// Decodes the bytes of `encode_ranges`; no bytes are no ranges. \returns kCorrupt for bytes that `encode_ranges` does
/// not make of merged ranges.
base::Result<std::vector<BlockRange>> decode_ranges(std::string_view bytes, int64_t block_bytes);

}  // namespace bytecheckpoint::planner
