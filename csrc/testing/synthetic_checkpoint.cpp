// SPDX-License-Identifier: Apache-2.0
#include "csrc/testing/synthetic_checkpoint.h"

#include <algorithm>

#include "csrc/base/bytes.h"
#include "csrc/format/torch/zip_record.h"

namespace bytecheckpoint::testing {
namespace {

using base::Code;
using base::Status;
using base::text;

constexpr tensor::DType kDType = tensor::DType::kBFloat16;
constexpr int64_t kShardRows = 16;
constexpr int64_t kShardColumns = 4096;
constexpr int64_t kGroupRanks = 80;
constexpr int64_t kGridColumns = 8;

/// How one tensor is divided into shards, row-major, one for each rank.
struct Grid {
  int64_t rows = 1;
  int64_t columns = 1;

  int64_t num_shards() const { return rows * columns; }
  tensor::Box box(int64_t shard) const {
    return {{shard / columns * kShardRows, shard % columns * kShardColumns}, {kShardRows, kShardColumns}};
  }
};

base::Result<Grid> grid_of(std::string_view kind, int64_t num_ranks) {
  if (kind == "fsdp") return Grid{num_ranks, 1};
  const int64_t shards = std::min(num_ranks, kGroupRanks);
  if (kind != "3d" || num_ranks % shards != 0 || shards % kGridColumns != 0) {
    return Status::make(Code::kInvalidArgument, text("synthetic checkpoint: no '", kind, "' of ", num_ranks, " ranks"));
  }
  return Grid{shards / kGridColumns, kGridColumns};
}

format::Item planned_item(const Grid& grid, int64_t number) {
  static constexpr const char* kParts[] = {"attention.wq", "attention.wo", "feed_forward.w1", "feed_forward.w2"};
  format::Item item;
  item.fqn = text("model.layers.", number / 4, ".", kParts[number % 4], ".weight");
  item.is_tensor = true;
  item.ordinal = static_cast<uint32_t>(number);
  item.tensor.dtype = kDType;
  item.tensor.sizes = {grid.rows * kShardRows, grid.columns * kShardColumns};
  item.chunks.resize(static_cast<size_t>(grid.num_shards()));
  for (int64_t shard = 0; shard < grid.num_shards(); ++shard) {
    item.chunks[static_cast<size_t>(shard)].box = grid.box(shard);
  }
  return item;
}

format::FileEntry file_of(int64_t rank) {
  format::FileEntry file;
  file.id.rank = static_cast<uint32_t>(rank);
  uint64_t digits = static_cast<uint64_t>(rank) * 0x9E3779B97F4A7C15u;  // as different from each other as random ids
  std::memcpy(file.id.file_id.data(), &digits, sizeof digits);
  file.name = format::data_file_name(file.id);
  return file;
}

base::Result<format::WriteResult> written_by(const Grid& grid, const std::vector<format::Item>& items, int64_t rank,
                                             int64_t num_chunks) {
  format::WriteResult result;
  result.files.push_back(file_of(rank));
  const int64_t first_item = rank / grid.num_shards() * num_chunks;
  int64_t position = format::kHeaderBytes;
  for (int64_t n = first_item; n < first_item + num_chunks; ++n) {
    const tensor::Box box = grid.box(rank % grid.num_shards());
    position = base::align_up(position, format::kRecordAlignment);
    BCP_ASSIGN_OR_RETURN(const format::RecordExtent extent, format::ZipRecord::measure(kDType, box.sizes, position));
    result.records.push_back({items[static_cast<size_t>(n)].fqn,
                              box,
                              {format::RecordKind::kTensor, kDType, 0, position, extent.record_bytes,
                               extent.data_offset, extent.data_bytes}});
    position += extent.record_bytes;
  }
  const int64_t table_bytes = 4 * format::num_blocks_of(position);
  result.files[0].bytes = position + table_bytes + format::kDataTrailerBytes;
  return result;
}

}  // namespace

base::Result<SyntheticCheckpoint> make_synthetic_checkpoint(std::string_view kind, int64_t num_ranks,
                                                            int64_t chunks_per_rank) {
  if (num_ranks < 1 || chunks_per_rank < 1) {
    return Status::make(Code::kInvalidArgument, "synthetic checkpoint: at least one rank and one chunk wanted");
  }
  BCP_ASSIGN_OR_RETURN(const Grid grid, grid_of(kind, num_ranks));
  SyntheticCheckpoint made;
  made.plan.checkpoint_id = "/checkpoints/step-1000";
  const int64_t num_items = num_ranks / grid.num_shards() * chunks_per_rank;
  for (int64_t n = 0; n < num_items; ++n) made.plan.items.push_back(planned_item(grid, n));
  for (int64_t rank = 0; rank < num_ranks; ++rank) {
    BCP_ASSIGN_OR_RETURN(format::WriteResult result, written_by(grid, made.plan.items, rank, chunks_per_rank));
    made.results.push_back(std::move(result));
  }
  return made;
}

}  // namespace bytecheckpoint::testing
