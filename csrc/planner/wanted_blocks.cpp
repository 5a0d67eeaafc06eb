// SPDX-License-Identifier: Apache-2.0
#include "csrc/planner/wanted_blocks.h"

#include <algorithm>

#include "csrc/base/bytes.h"
#include "csrc/base/varint.h"
#include "csrc/tensor/strided_view.h"

namespace bytecheckpoint::planner {
namespace {

using base::Code;
using base::Status;
using base::text;

// ranges = number of ranges, then for each range: files skipped since the range before, blocks skipped since its end
//          (since the start of the file, if it is another one), number of blocks
constexpr size_t kLeastRangeBytes = 3;

/// Appends the block ranges of one box. Steps from block to block, not from run to run: a narrow column of a long
/// tensor costs one step per block.
void append_ranges(const WantedBox& wanted, uint32_t index, int64_t block_bytes,
                   std::vector<WantedBlocks::OfBox>* out) {
  const auto runs =
      tensor::BoxRuns::of_strides(wanted.sizes, wanted.strides_bytes, wanted.itemsize_bytes, wanted.strides_bytes);
  const size_t first = out->size();
  for (int64_t run = 0; run < runs.num_runs();) {
    const int64_t from = wanted.offset + runs.chunk_offset(run);
    const BlockRange range{wanted.file, base::align_down(from, block_bytes),
                           base::align_up(from + runs.run_bytes(), block_bytes)};
    if (out->size() > first && out->back().range.end >= range.begin) {
      out->back().range.end = range.end;
    } else {
      out->push_back({range, index});
    }
    run = runs.first_run_ending_after(range.end - wanted.offset);
  }
}

}  // namespace

base::Result<WantedBox> wanted_of_chunk(uint32_t file, int64_t data_offset, const tensor::Dims& chunk_sizes,
                                        const tensor::Box& box, int64_t itemsize_bytes) {
  if (!tensor::is_inside(box, chunk_sizes)) {
    return Status::make(Code::kInvalidArgument,
                        text("wanted box at ", tensor::to_text(box.offsets), " of ", tensor::to_text(box.sizes),
                             " is not inside a chunk of shape ", tensor::to_text(chunk_sizes)));
  }
  WantedBox wanted{file, data_offset, box.sizes, tensor::Dims(box.num_dims()), itemsize_bytes};
  if (!tensor::has_elements(box)) return wanted;
  wanted.strides_bytes = tensor::row_major_strides(chunk_sizes);
  for (size_t d = 0; d < box.num_dims(); ++d) {
    wanted.strides_bytes[d] *= itemsize_bytes;
    wanted.offset += box.offsets[d] * wanted.strides_bytes[d];
  }
  return wanted;
}

WantedBlocks find_wanted_blocks(const std::vector<WantedBox>& wanted, int64_t block_bytes) {
  WantedBlocks blocks;
  for (uint32_t i = 0; i < wanted.size(); ++i) {
    append_ranges(wanted[i], i, block_bytes, &blocks.ranges);
    int64_t numel = 0;
    (void)tensor::checked_numel(wanted[i].sizes, &numel);
    blocks.bytes_wanted += numel * wanted[i].itemsize_bytes;
  }
  std::sort(blocks.ranges.begin(), blocks.ranges.end(), [](const WantedBlocks::OfBox& a, const WantedBlocks::OfBox& b) {
    return a.range.file != b.range.file ? a.range.file < b.range.file : a.range.begin < b.range.begin;
  });
  return blocks;
}

std::vector<BlockRange> WantedBlocks::merged() const {
  std::vector<BlockRange> out;
  for (const OfBox& of_box : ranges) {
    const BlockRange& range = of_box.range;
    if (!out.empty() && out.back().file == range.file && out.back().end >= range.begin) {
      out.back().end = std::max(out.back().end, range.end);
    } else {
      out.push_back(range);
    }
  }
  return out;
}

std::string encode_ranges(const std::vector<BlockRange>& merged, int64_t block_bytes) {
  base::VarintWriter out;
  out.number(merged.size());
  BlockRange last;
  for (const BlockRange& range : merged) {
    if (range.file != last.file) last.end = 0;
    out.number(range.file - last.file);
    out.number(static_cast<uint64_t>((range.begin - last.end) / block_bytes));
    out.number(static_cast<uint64_t>((range.end - range.begin) / block_bytes));
    last = range;
  }
  return out.take();
}

base::Result<std::vector<BlockRange>> decode_ranges(std::string_view bytes, int64_t block_bytes) {
  if (bytes.empty()) return std::vector<BlockRange>();
  base::VarintReader reader(bytes);
  const auto damaged = [&] {
    return Status::make(Code::kCorrupt,
                        text("block ranges of a rank: damaged at byte ", reader.position(), " of ", bytes.size()));
  };
  const int64_t most_blocks = INT64_MAX / block_bytes;
  std::vector<BlockRange> ranges(reader.count(kLeastRangeBytes));
  BlockRange last;
  for (BlockRange& range : ranges) {
    const uint32_t files = reader.u32();
    const int64_t passed_over = reader.i64();
    const int64_t num_blocks = reader.i64();
    if (!reader.ok() || files > UINT32_MAX - last.file) return damaged();
    range.file = last.file + files;
    const int64_t from = files == 0 ? last.end / block_bytes : 0;
    const bool is_apart = &range == ranges.data() || files != 0 || passed_over != 0;
    if (!is_apart || num_blocks == 0 || passed_over > most_blocks - from) return damaged();
    if (num_blocks > most_blocks - from - passed_over) return damaged();
    range.begin = (from + passed_over) * block_bytes;
    range.end = range.begin + num_blocks * block_bytes;
    last = range;
  }
  if (!reader.ok() || reader.remaining() != 0) return damaged();
  return ranges;
}

}  // namespace bytecheckpoint::planner
