// SPDX-License-Identifier: Apache-2.0
#include "csrc/engine/load_job.h"

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <optional>

#include "csrc/base/crc32.h"
#include "csrc/engine/open_checkpoint.h"
#include "csrc/io/directory.h"
#include "csrc/io/reader.h"
#include "csrc/staging/arena.h"
#include "csrc/staging/merge.h"

namespace bytecheckpoint::engine {

using base::Code;
using base::Status;
using base::text;

/// Hands out the segments of a plan in order, opening each file when its first segment is due.
class LoadJob::Source {
 public:
  Source(const LoadJob& job, const planner::LoadPlan& plan) : job_(job), plan_(plan) {}

  base::Result<std::optional<io::ReadRequest>> next() {
    while (file_ < plan_.files.size() && segment_ == plan_.files[file_].segments.size()) {
      ++file_;
      segment_ = 0;
    }
    if (file_ == plan_.files.size()) return std::optional<io::ReadRequest>();
    const planner::FileReads& reads = plan_.files[file_];
    if (segment_ == 0) {
      BCP_ASSIGN_OR_RETURN(current_,
                           SourceFile::open(job_.options_.directory, job_.manifest_, job_.manifest_.files[reads.file]));
      BCP_ASSIGN_OR_RETURN(io::File file, io::File::open(current_->path, job_.options_.direct_io));
      current_file_ = std::make_shared<io::File>(std::move(file));
      base::MutexLock lock(mutex_);
      open_.push_back(current_);
    }
    const planner::ReadSegment& segment = reads.segments[segment_];
    if (segment.offset >= current_->end_of_records) {
      return current_->behind_the_records(segment.offset);
    }
    io::ReadRequest request;
    request.file = current_file_;
    request.offset = segment.offset;
    request.wanted = std::min(segment.bytes, current_->end_of_records - segment.offset);
    request.size = base::align_up(request.wanted, io::kDirectAlignment);
    request.tag = file_ << 32 | segment_++;
    return std::optional<io::ReadRequest>(std::move(request));
  }

  const planner::ReadSegment& segment(size_t tag) const { return plan_.files[tag >> 32].segments[tag & 0xFFFFFFFFu]; }
  std::shared_ptr<const SourceFile> open_file(size_t tag) {
    base::MutexLock lock(mutex_);
    return open_[tag >> 32];
  }

 private:
  const LoadJob& job_;
  const planner::LoadPlan& plan_;
  size_t file_ = 0;
  size_t segment_ = 0;
  std::shared_ptr<const SourceFile> current_;
  std::shared_ptr<io::File> current_file_;
  base::Mutex mutex_;
  std::vector<std::shared_ptr<const SourceFile>> open_ BCP_GUARDED_BY(mutex_);
};

LoadJob::LoadJob(LoadOptions options, const format::Manifest& manifest)
    : options_(std::move(options)), manifest_(manifest) {}

Status LoadJob::add_tensor(const std::string& fqn, const format::Chunk& chunk, const TensorPlace& place,
                           const tensor::Box& box, const tensor::StridedView& memory) {
  const auto refuse = [&](const std::string& why) {
    return Status::make(Code::kInvalidArgument, text("while loading '", fqn, "': ", why), options_.directory);
  };
  if (!tensor::is_inside(box, chunk.box.sizes)) {
    return refuse(text("box at ", tensor::to_text(box.offsets), " of ", tensor::to_text(box.sizes),
                       " is not inside the stored chunk of shape ", tensor::to_text(chunk.box.sizes)));
  }
  if (memory.sizes != box.sizes || memory.dtype != place.dtype) {
    return refuse(text("wanted ", tensor::to_text(box.sizes), ", got memory of ", tensor::to_text(memory.sizes)));
  }
  const int64_t itemsize = tensor::find_dtype(place.dtype)->itemsize_bytes;
  // Seen with its dims in the order in which they are stored, every chunk is row-major.
  const auto stored_order = [&](const tensor::Dims& dims) {
    tensor::Dims ordered = dims;
    for (size_t d = 0; d < place.dim_order.size(); ++d) ordered[d] = dims[place.dim_order[d]];
    return ordered;
  };
  tensor::Dims chunk_sizes = stored_order(chunk.box.sizes);
  tensor::Box stored_box{stored_order(box.offsets), stored_order(box.sizes)};
  tensor::Dims strides_bytes = stored_order(memory.strides_bytes);
  int64_t unit_bytes = itemsize;
  if (place.data_offset % itemsize != 0) {
    // Foreign archives begin anywhere, so a segment may end inside an element: then the bytes of an element are a dim.
    chunk_sizes.push_back(itemsize);
    stored_box.offsets.push_back(0);
    stored_box.sizes.push_back(itemsize);
    strides_bytes.push_back(1);
    unit_bytes = 1;
  }
  wanted_.push_back({chunk.record.file, place.data_offset, chunk_sizes, stored_box, unit_bytes});
  destinations_.push_back({tensor::BoxRuns(chunk_sizes, stored_box, unit_bytes, strides_bytes), memory.data,
                           box.sizes == chunk.box.sizes ? place.data_crc : std::nullopt});
  return Status::ok();
}

void LoadJob::add_bytes(const format::Record& record, uint8_t* memory) {
  const tensor::Dims sizes = {record.bytes};
  wanted_.push_back({record.file, record.offset, sizes, tensor::whole(sizes), 1});
  destinations_.push_back({tensor::BoxRuns(sizes, tensor::whole(sizes), 1, {1}), memory, std::nullopt});
}

base::Result<LoadStats> LoadJob::run(const std::function<bool()>& cancelled) {
  // However it ends: a later run must not write to memory that its owner was told is no longer needed.
  struct Forget {
    LoadJob* job;
    ~Forget() {
      job->wanted_.clear();
      job->destinations_.clear();
      job->summed_.clear();
    }
  } const forget{this};
  const auto begin = std::chrono::steady_clock::now();
  BCP_ASSIGN_OR_RETURN(const planner::LoadPlan plan,
                       planner::plan_load(wanted_, format::kBlockBytes, staging::kSlotBytes));
  Status outcome = execute(plan, cancelled);
  if (outcome.is_ok()) outcome = check_archives();
  if (!outcome.is_ok()) return explain(std::move(outcome));
  LoadStats stats;
  stats.num_boxes = static_cast<int64_t>(wanted_.size());
  stats.num_files = static_cast<int64_t>(plan.files.size());
  stats.bytes_wanted = plan.bytes_wanted;
  stats.bytes_read = plan.bytes_read;
  stats.seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
  return stats;
}

Status LoadJob::execute(const planner::LoadPlan& plan, const std::function<bool()>& cancelled) {
  BCP_ASSIGN_OR_RETURN(const staging::BorrowedRing ring, staging::BorrowedRing::borrow(options_.ring_bytes));
  Source source(*this, plan);
  io::Reader reader(
      options_.num_io_threads, ring->num_slots(), [&] { return source.next(); },
      [&](int slot) { return ring->slot(slot); });
  int64_t bytes_read = 0;
  while (const auto filled = reader.next()) {
    BCP_RETURN_IF_ERROR(filled->status);
    if (cancelled()) return Status::make(Code::kCancelled, text("load(", options_.directory, "): interrupted"));
    const size_t tag = filled->request.tag;
    BCP_RETURN_IF_ERROR(deliver(ring->slot(filled->slot), source.segment(tag), *source.open_file(tag)));
    reader.release(filled->slot);
    if (!options_.progress) continue;
    bytes_read += source.segment(tag).bytes;
    // In proportion: what a segment delivers is not counted one by one.
    const double share = static_cast<double>(bytes_read) / static_cast<double>(plan.bytes_read);
    options_.progress(static_cast<int64_t>(static_cast<double>(plan.bytes_wanted) * share));
  }
  return Status::ok();
}

Status LoadJob::deliver(const uint8_t* slot, const planner::ReadSegment& segment, const SourceFile& file) {
  const int64_t end = std::min(segment.offset + segment.bytes, file.end_of_records);
  if (options_.verify && file.has_checksums) {
    BCP_RETURN_IF_ERROR(file.check_blocks(slot, segment.offset, end - segment.offset));
  }
  for (const uint32_t index : segment.wanted) {
    // The window in bytes of the chunk; a chunk may begin behind the segment's start or end before its end.
    const int64_t data_offset = wanted_[index].data_offset;
    const Destination& destination = destinations_[index];
    if (data_offset + destination.runs.end() > file.end_of_records) return file.behind_the_records(data_offset);
    const int64_t from = std::max(segment.offset, data_offset);
    if (from >= end) continue;
    staging::scatter_window(destination.runs, slot + (from - segment.offset), from - data_offset, end - data_offset,
                            destination.memory);
    if (options_.verify && destination.data_crc.has_value()) {
      const int64_t to = std::min(end, data_offset + destination.runs.end());
      summed_.push_back({index, from - data_offset, to - data_offset,
                         base::crc32(0, slot + (from - segment.offset), static_cast<size_t>(to - from))});
    }
  }
  return Status::ok();
}

Status LoadJob::check_archives() {
  std::sort(summed_.begin(), summed_.end(), [](const Summed& a, const Summed& b) {
    return a.destination != b.destination ? a.destination < b.destination : a.begin < b.begin;
  });
  for (size_t i = 0; i < summed_.size();) {
    const uint32_t index = summed_[i].destination;
    uint32_t crc = 0;
    for (; i < summed_.size() && summed_[i].destination == index; ++i) {
      crc = base::crc32_combine(crc, summed_[i].crc, static_cast<uint64_t>(summed_[i].end - summed_[i].begin));
    }
    if (crc == *destinations_[index].data_crc) continue;
    const std::string path = io::join(options_.directory, manifest_.files[wanted_[index].file].name);
    return Status::make(
        Code::kCorrupt,
        text("read(", path, ", offset=", wanted_[index].data_offset, ", ", destinations_[index].runs.end(),
             " bytes): data have CRC ", crc, ", the archive says ", *destinations_[index].data_crc,
             "; if it was written with torch.serialization.set_crc32_options(False), load with "
             "Config(verify=False)"),
        path);
  }
  return Status::ok();
}

Status LoadJob::explain(Status failure) const {
  if (failure.code() != Code::kCorrupt && failure.sys_errno() != ENOENT) return failure;
  const auto current = open_checkpoint(options_.directory, {options_.scope});
  if (!current.is_ok() || current.value().save_id == manifest_.save_id) {
    // Still the same checkpoint: then a file that is gone is damage.
    if (failure.sys_errno() != ENOENT) return failure;
    return Status::make(Code::kCorrupt, text("a data file of the checkpoint is missing: ", failure.message()),
                        failure.path(), ENOENT);
  }
  return Status::make(Code::kChanged,
                      text("load(", options_.directory,
                           "): a newer commit replaced the checkpoint "
                           "while it was read (",
                           failure.message(), ")"),
                      options_.directory);
}

}  // namespace bytecheckpoint::engine
