// SPDX-License-Identifier: Apache-2.0
#include "csrc/engine/export/copy_shard.h"

#include <string_view>
#include <unordered_map>
#include <utility>

#include "csrc/engine/check/foreign_check.h"
#include "csrc/io/directory.h"

namespace bytecheckpoint::engine {
namespace {

using base::Code;
using base::Status;
using base::text;

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
        reader_(options.reading, checkpoint_, view, options.convert, options.computed) {
    if (options.checksums != nullptr) reader_.follow(options.checksums);
  }

  base::Result<format::WriteResult> copy(const ShardToCopy& shard, SaveJob* job) {
    BCP_RETURN_IF_ERROR(add_tensors(shard.tensors));
    BCP_RETURN_IF_ERROR(add_records(shard.as_is));
    BCP_RETURN_IF_ERROR(check_records(shard.as_is));
    std::vector<RecordToFill> to_fill;
    for (const Piece& piece : pieces_) {
      to_fill.push_back({piece.fqn, &piece.box, piece.kind, piece.dtype, piece.bytes});
    }
    const RecordSource source{
        [this](size_t p, int64_t begin, int64_t end, uint8_t* to) { return want(pieces_[p], begin, end, to); },
        [this] { return run(); }};
    BCP_RETURN_IF_ERROR(job->append_filled(to_fill, source));
    return job->finish();
  }

 private:
  /// A record to write: rows of a tensor, or a stored record.
  struct Piece {
    const std::string* fqn;
    tensor::Box box;
    format::RecordKind kind;
    int64_t bytes;
    tensor::DType dtype = tensor::DType::kNone;
    size_t tensor = 0;  // of the reader
    int64_t first = 0;  // element of the tensor
    const format::Record* record = nullptr;
  };

  Status add_tensors(const std::vector<RowsToCopy>& all_rows) {
    std::vector<TensorToRead> tensors;
    for (const RowsToCopy& rows : all_rows) tensors.push_back(rows.tensor);
    BCP_RETURN_IF_ERROR(reader_.locate(tensors));
    for (size_t t = 0; t < all_rows.size(); ++t) {
      const RowsToCopy& rows = all_rows[t];
      const tensor::Dims& sizes = reader_.item(t).tensor.sizes;
      tensor::Box box = rows_of(sizes, rows);
      if (!tensor::is_inside(box, sizes)) {
        return Status::make(Code::kInvalidArgument,
                            text("'", rows.tensor.fqn, "': ", rows.rows, " rows from ", rows.first,
                                 " on are not in a tensor of ", tensor::to_text(sizes)));
      }
      const int64_t num_rows = sizes.empty() ? 1 : sizes[0];
      const int64_t row_numel = num_rows == 0 ? 0 : reader_.numel(t) / num_rows;
      const int64_t bytes = (sizes.empty() ? 1 : rows.rows) * row_numel * reader_.itemsize_bytes(t);
      pieces_.push_back({&rows.tensor.fqn, std::move(box), format::RecordKind::kTensor, bytes, rows.tensor.dtype, t,
                         rows.first * row_numel});
    }
    return Status::ok();
  }

  Status add_records(const std::vector<std::string>& fqns) {
    std::vector<const format::Chunk*> chunks;
    for (const std::string& fqn : fqns) {
      const auto refuse = [&](Code code, std::string_view why) {
        return Status::make(code, text("while copying '", fqn, "': ", why));
      };
      const format::Item* item = checkpoint_->find(fqn);
      if (item == nullptr) return refuse(Code::kInvalidArgument, "the checkpoint has no such item");
      for (size_t c = 0; c < item->chunks.size(); ++c) {
        const format::Chunk& chunk = item->chunks[c];
        if (view_ != nullptr && view_->find(*item, c) != nullptr) {
          return refuse(Code::kUnsupported, "a transform needs plain elements");
        }
        chunks.push_back(&chunk);
        pieces_.push_back({&fqn, item->is_tensor ? chunk.box : tensor::Box{},
                           item->is_tensor ? format::RecordKind::kOpaque : format::RecordKind::kBytes,
                           chunk.record.bytes});
        pieces_.back().record = &chunk.record;
      }
    }
    return check_extents(options_.reading.directory, *checkpoint_, chunks);
  }

  /// Compares records that are copied as they are, such as archives, with the checksums that another writer has put
  /// into them. They are read for that alone: only the runs of tensors are followed. \returns kCorrupt.
  Status check_records(const std::vector<std::string>& fqns) const {
    const bool has_checksums =
        checkpoint_->foreign.has_value() && checkpoint_->foreign->format == std::string_view("dcp");
    if (fqns.empty() || !options_.reading.verify || !has_checksums) return Status::ok();
    format::Manifest copied;
    copied.files = checkpoint_->files;
    copied.foreign = checkpoint_->foreign;
    for (const std::string& fqn : fqns) copied.items.push_back(*checkpoint_->find(fqn));
    const std::string& directory = options_.reading.directory;
    BCP_ASSIGN_OR_RETURN(const ForeignCheck checked,
                         check_foreign_records(directory, copied, options_.reading.num_io_threads,
                                               [this](int64_t, int64_t) { return options_.progress(done_); }));
    if (checked.problems.empty()) return Status::ok();
    const Problem& first = checked.problems.front();
    const std::string path = io::join(directory, first.file);
    return Status::make(Code::kCorrupt,
                        text("while copying '", first.fqns.empty() ? fqns.front() : first.fqns.front(), "': read(",
                             path, ", offset=", first.offset, ", ", first.bytes, " bytes): ", first.message),
                        path);
  }

  Status want(const Piece& piece, int64_t begin, int64_t end, uint8_t* to) {
    wanted_bytes_ += end - begin;
    if (first_wanted_ == nullptr) first_wanted_ = piece.fqn;
    last_wanted_ = piece.fqn;
    if (piece.record != nullptr) {
      reader_.want_record(*piece.record, begin, end, to);
      return Status::ok();
    }
    const int64_t itemsize = reader_.itemsize_bytes(piece.tensor);
    return reader_.want(piece.tensor, piece.first + begin / itemsize, piece.first + end / itemsize, to)
        .with_context(text("while copying '", *piece.fqn, "'"));
  }

  Status run() {
    const std::string* first = std::exchange(first_wanted_, nullptr);
    Status outcome = reader_.run([this] { return !options_.progress(done_); });
    done_ += std::exchange(wanted_bytes_, 0);
    if (!outcome.is_ok() && first != nullptr) {
      const std::string last = last_wanted_ == first ? std::string() : text(" to '", *last_wanted_, "'");
      return std::move(outcome).with_context(text("while copying '", *first, "'", last));
    }
    if (!outcome.is_ok() || options_.progress(done_)) return outcome;
    return Status::make(Code::kCancelled, text("copy(", options_.saving.directory, "): interrupted"));
  }

  const CopyOptions& options_;
  const std::shared_ptr<const format::Manifest> checkpoint_;
  const CheckpointView* const view_;
  ElementReader reader_;
  std::vector<Piece> pieces_;
  // By the next run.
  const std::string* first_wanted_ = nullptr;
  const std::string* last_wanted_ = nullptr;
  int64_t wanted_bytes_ = 0;
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
