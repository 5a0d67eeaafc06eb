// SPDX-License-Identifier: Apache-2.0
#include "csrc/engine/copy_shard.h"

#include <cstring>
#include <string_view>
#include <unordered_map>
#include <utility>

namespace bytecheckpoint::engine {
namespace {

using base::Code;
using base::Status;
using base::text;

/// Most bytes of chunks that are read in one run.
constexpr int64_t kTogetherBytes = 4 << 20;

tensor::Box rows_of(const tensor::Dims& sizes, const RowsToCopy& rows) {
  tensor::Box box = tensor::whole(sizes);
  if (sizes.empty()) return box;
  box.offsets[0] = rows.first;
  box.sizes[0] = rows.rows;
  return box;
}

class Copier {
 public:
  Copier(const CopyOptions& options, std::shared_ptr<const format::Manifest> checkpoint, const CheckpointView* view)
      : options_(options),
        checkpoint_(std::move(checkpoint)),
        view_(view),
        reader_(options.reading, checkpoint_, view, options.convert) {}

  base::Result<format::WriteResult> copy(const ShardToCopy& shard, SaveJob* job) {
    std::vector<TensorToRead> tensors;
    for (const RowsToCopy& rows : shard.tensors) tensors.push_back(rows.tensor);
    BCP_RETURN_IF_ERROR(reader_.locate(tensors));
    for (const RowsToCopy& rows : shard.tensors) {
      BCP_ASSIGN_OR_RETURN(Range range, range_of(ranges_.size(), rows));
      ranges_.push_back(std::move(range));
    }
    for (size_t begin = 0, end = 0; begin < ranges_.size(); begin = end) {
      end = begin + 1;
      int64_t bytes = ranges_[begin].bytes;
      while (end < ranges_.size() && bytes + ranges_[end].bytes <= kTogetherBytes) bytes += ranges_[end++].bytes;
      BCP_RETURN_IF_ERROR(end == begin + 1 ? copy_alone(begin, job) : copy_together(begin, end, bytes, job));
    }
    for (const std::string& fqn : shard.as_is) {
      BCP_RETURN_IF_ERROR(copy_records(fqn, job).with_context("while copying '" + fqn + "'"));
    }
    return job->finish();
  }

 private:
  bool is_cancelled() { return !options_.progress(done_); }

  /// The elements of one chunk to write.
  struct Range {
    const RowsToCopy* rows;
    tensor::Box box;
    int64_t first;  // element of the tensor
    int64_t itemsize;
    int64_t bytes;
  };

  base::Result<Range> range_of(size_t t, const RowsToCopy& rows) const {
    const tensor::Dims& sizes = reader_.item(t).tensor.sizes;
    Range range{&rows, rows_of(sizes, rows), 0, reader_.itemsize_bytes(t), 0};
    if (!tensor::is_inside(range.box, sizes)) {
      return Status::make(Code::kInvalidArgument,
                          text("'", rows.tensor.fqn, "': ", rows.rows, " rows from ", rows.first,
                               " on are not in a tensor of ", tensor::to_text(sizes)));
    }
    const int64_t num_rows = sizes.empty() ? 1 : sizes[0];
    const int64_t row_numel = num_rows == 0 ? 0 : reader_.numel(t) / num_rows;
    range.first = rows.first * row_numel;
    range.bytes = (sizes.empty() ? 1 : rows.rows) * row_numel * range.itemsize;
    return range;
  }

  Status append(const Range& range, const FillBytes& fill, SaveJob* job) {
    const TensorToRead& tensor = range.rows->tensor;
    BCP_RETURN_IF_ERROR(job->append_filled(tensor.fqn, range.box, tensor.dtype, fill)
                            .with_context("while copying '" + tensor.fqn + "'"));
    done_ += range.bytes;
    return check_progress();
  }

  /// Reads the elements into the slots from which they are written.
  Status copy_alone(size_t t, SaveJob* job) {
    const Range& range = ranges_[t];
    return append(
        range,
        [&](int64_t begin, int64_t end, uint8_t* to) -> Status {
          const int64_t first = range.first + begin / range.itemsize;
          BCP_RETURN_IF_ERROR(reader_.want(t, first, first + (end - begin) / range.itemsize, to));
          return reader_.run([&] { return !options_.progress(done_ + begin); });
        },
        job);
  }

  /// Reads several chunks in one run, because each run costs some hundred microseconds.
  Status copy_together(size_t first, size_t last, int64_t bytes, SaveJob* job) {
    together_.resize(static_cast<size_t>(bytes));
    uint8_t* to = together_.data();
    for (size_t t = first; t < last; to += ranges_[t++].bytes) {
      const Range& range = ranges_[t];
      BCP_RETURN_IF_ERROR(reader_.want(t, range.first, range.first + range.bytes / range.itemsize, to));
    }
    BCP_RETURN_IF_ERROR(reader_.run([&] { return is_cancelled(); }));
    const uint8_t* from = together_.data();
    for (size_t t = first; t < last; from += ranges_[t++].bytes) {
      const auto fill = [&](int64_t begin, int64_t end, uint8_t* slot) {
        std::memcpy(slot, from + begin, static_cast<size_t>(end - begin));
        return Status::ok();
      };
      BCP_RETURN_IF_ERROR(append(ranges_[t], fill, job));
    }
    return Status::ok();
  }

  Status copy_records(const std::string& fqn, SaveJob* job) {
    const format::Item* item = checkpoint_->find(fqn);
    if (item == nullptr) return Status::make(Code::kInvalidArgument, "the checkpoint has no such item");
    std::vector<const format::Chunk*> chunks;
    for (size_t c = 0; c < item->chunks.size(); ++c) {
      chunks.push_back(&item->chunks[c]);
      if (view_ == nullptr || view_->find(*item, c) == nullptr) continue;
      return Status::make(Code::kUnsupported, "a transform needs plain elements");
    }
    BCP_RETURN_IF_ERROR(check_extents(options_.reading.directory, *checkpoint_, chunks));
    for (const format::Chunk& chunk : item->chunks) {
      BCP_ASSIGN_OR_RETURN(const std::string bytes, reader_.read_record(chunk.record, [&] { return is_cancelled(); }));
      BCP_RETURN_IF_ERROR(item->is_tensor ? job->append_opaque(fqn, chunk.box, bytes) : job->append_bytes(fqn, bytes));
      BCP_RETURN_IF_ERROR(check_progress());
    }
    return Status::ok();
  }

  Status check_progress() {
    if (!is_cancelled()) return Status::ok();
    return Status::make(Code::kCancelled, text("copy(", options_.saving.directory, "): interrupted"));
  }

  const CopyOptions& options_;
  const std::shared_ptr<const format::Manifest> checkpoint_;
  const CheckpointView* const view_;
  ElementReader reader_;
  std::vector<Range> ranges_;  // of each tensor of the reader
  std::vector<uint8_t> together_;
  int64_t done_ = 0;
};

}  // namespace

base::Result<format::WriteResult> copy_shard(const CopyOptions& options,
                                             std::shared_ptr<const format::Manifest> checkpoint,
                                             const CheckpointView* view, const ShardToCopy& shard) {
  BCP_ASSIGN_OR_RETURN(const std::unique_ptr<SaveJob> job, SaveJob::start(options.saving));
  Copier copier(options, std::move(checkpoint), view);
  base::Result<format::WriteResult> result = copier.copy(shard, job.get());
  if (!result.is_ok()) job->cancel();
  return result;
}

base::Result<format::Manifest> plan_copy(const format::Manifest& checkpoint, const std::vector<ShardToCopy>& shards) {
  format::Manifest plan;
  std::unordered_map<std::string_view, size_t> numbers;
  const auto find = [&](const std::string& fqn) -> base::Result<const format::Item*> {
    const format::Item* item = checkpoint.find(fqn);
    if (item != nullptr) return item;
    return Status::make(Code::kInvalidArgument, text("'", fqn, "': the checkpoint has no such item"));
  };
  const auto add = [&](const format::Item& item) -> format::Item& {
    const auto [number, is_new] = numbers.emplace(item.fqn, plan.items.size());
    if (is_new) {
      plan.items.push_back(item);
      plan.items.back().chunks.clear();
      plan.items.back().is_partial = false;
      plan.items.back().ordinal = static_cast<uint32_t>(number->second);
    }
    return plan.items[number->second];
  };
  for (const ShardToCopy& shard : shards) {
    for (const RowsToCopy& rows : shard.tensors) {
      BCP_ASSIGN_OR_RETURN(const format::Item* item, find(rows.tensor.fqn));
      format::Item& planned = add(*item);
      planned.tensor.dtype = rows.tensor.dtype;
      planned.chunks.push_back({rows_of(item->tensor.sizes, rows), {}});
    }
    for (const std::string& fqn : shard.as_is) {
      BCP_ASSIGN_OR_RETURN(const format::Item* item, find(fqn));
      format::Item& planned = add(*item);
      planned.is_partial = item->is_partial;
      for (const format::Chunk& chunk : item->chunks) planned.chunks.push_back({chunk.box, {}});
    }
  }
  return plan;
}

}  // namespace bytecheckpoint::engine
