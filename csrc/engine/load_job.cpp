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

/// What is kept of a data file that was compared with the manifest; its descriptor goes with its last read.
struct LoadJob::OpenFile {
  std::string path;
  int64_t end_of_records = 0;
  std::vector<uint32_t> table;
};

namespace {

/// Trailer and block table of `entry`, compared with the manifest: a stale, swapped or foreign file is seen here,
/// before any of its data.
Status check_against_manifest(const io::File& file, const format::FileEntry& entry, const std::string& tail,
                              format::DataTrailer* out) {
  base::Result<format::DataTrailer> trailer = format::decode_data_trailer(tail, entry.bytes);
  if (!trailer.is_ok()) {
    return Status::make(trailer.status().code(), text("read(", file.path(), "): ", trailer.status().message()),
                        file.path());
  }
  *out = trailer.value();
  if (out->id.file_id != entry.id.file_id || out->trailer_crc != entry.trailer_crc || out->id.rank != entry.id.rank ||
      out->id.number != entry.id.number) {
    return Status::make(Code::kCorrupt,
                        text("read(", file.path(), ", offset=", entry.bytes - format::kDataTrailerBytes,
                             "): trailer of file ", base::to_hex(out->id.file_id), " with CRC ", out->trailer_crc,
                             ", the metadata wants ", base::to_hex(entry.id.file_id), " with CRC ", entry.trailer_crc),
                        file.path());
  }
  return Status::ok();
}

}  // namespace

/// Hands out the segments of a plan in order, opening each file when its first segment is due.
class LoadJob::Source {
 public:
  Source(const LoadJob& job, const planner::LoadPlan& plan) : job_(job), plan_(plan) {}

  static Status behind_the_records(const OpenFile& file, int64_t offset) {
    return Status::make(Code::kCorrupt,
                        text("read(", file.path, ", offset=", offset, "): the metadata wants a record there, the ",
                             "records end at ", file.end_of_records),
                        file.path);
  }

  base::Result<std::optional<io::ReadRequest>> next() {
    while (file_ < plan_.files.size() && segment_ == plan_.files[file_].segments.size()) {
      ++file_;
      segment_ = 0;
    }
    if (file_ == plan_.files.size()) return std::optional<io::ReadRequest>();
    const planner::FileReads& reads = plan_.files[file_];
    if (segment_ == 0) {
      BCP_ASSIGN_OR_RETURN(current_, open(job_.manifest_.files[reads.file]));
      BCP_ASSIGN_OR_RETURN(io::File file, io::File::open(current_->path, job_.options_.direct_io));
      current_file_ = std::make_shared<io::File>(std::move(file));
      base::MutexLock lock(mutex_);
      open_.push_back(current_);
    }
    const planner::ReadSegment& segment = reads.segments[segment_];
    if (segment.offset >= current_->end_of_records) return behind_the_records(*current_, segment.offset);
    io::ReadRequest request;
    request.file = current_file_;
    request.offset = segment.offset;
    request.wanted = std::min(segment.bytes, current_->end_of_records - segment.offset);
    request.size = base::align_up(request.wanted, io::kDirectAlignment);
    request.tag = file_ << 32 | segment_++;
    return std::optional<io::ReadRequest>(std::move(request));
  }

  const planner::ReadSegment& segment(size_t tag) const { return plan_.files[tag >> 32].segments[tag & 0xFFFFFFFFu]; }
  std::shared_ptr<const OpenFile> open_file(size_t tag) {
    base::MutexLock lock(mutex_);
    return open_[tag >> 32];
  }

 private:
  base::Result<std::shared_ptr<const OpenFile>> open(const format::FileEntry& entry) const {
    const std::string path = io::join(job_.options_.directory, entry.name);
    BCP_ASSIGN_OR_RETURN(io::File plain, io::File::open(path, /*direct=*/false));
    BCP_ASSIGN_OR_RETURN(const int64_t size, plain.size());
    if (size != entry.bytes) {
      return Status::make(Code::kCorrupt, text("read(", path, "): ", size, " bytes, the metadata wants ", entry.bytes),
                          path);
    }
    std::string tail(static_cast<size_t>(format::kDataTrailerBytes), '\0');
    BCP_RETURN_IF_ERROR(plain
                            .read_at(tail.data(), format::kDataTrailerBytes, size - format::kDataTrailerBytes,
                                     format::kDataTrailerBytes)
                            .status());
    format::DataTrailer trailer;
    BCP_RETURN_IF_ERROR(check_against_manifest(plain, entry, tail, &trailer));
    std::string table(static_cast<size_t>(trailer.table_bytes()), '\0');
    BCP_RETURN_IF_ERROR(
        plain.read_at(table.data(), trailer.table_bytes(), trailer.end_of_records, trailer.table_bytes()).status());
    const uint32_t table_crc = base::crc32(0, table.data(), table.size());
    if (table_crc != trailer.table_crc) {
      return Status::make(Code::kCorrupt,
                          text("read(", path, ", offset=", trailer.end_of_records, "): block table has CRC ", table_crc,
                               ", stored ", trailer.table_crc),
                          path);
    }
    auto opened = std::make_shared<OpenFile>();
    opened->path = path;
    opened->end_of_records = trailer.end_of_records;
    opened->table = format::decode_block_table(table);
    return std::shared_ptr<const OpenFile>(std::move(opened));
  }

  const LoadJob& job_;
  const planner::LoadPlan& plan_;
  size_t file_ = 0;
  size_t segment_ = 0;
  std::shared_ptr<const OpenFile> current_;
  std::shared_ptr<io::File> current_file_;
  base::Mutex mutex_;
  std::vector<std::shared_ptr<const OpenFile>> open_ BCP_GUARDED_BY(mutex_);
};

LoadJob::LoadJob(LoadOptions options, const format::Manifest& manifest)
    : options_(std::move(options)), manifest_(manifest) {}

Status LoadJob::add_tensor(const std::string& fqn, const format::Chunk& chunk, const tensor::Box& box,
                           const tensor::StridedView& memory) {
  const auto refuse = [&](const std::string& why) {
    return Status::make(Code::kInvalidArgument, text("while loading '", fqn, "': ", why), options_.directory);
  };
  if (chunk.record.kind != format::RecordKind::kTensor) return refuse("the record is not a plain tensor");
  if (!tensor::is_inside(box, chunk.box.sizes)) {
    return refuse(text("box at ", tensor::to_text(box.offsets), " of ", tensor::to_text(box.sizes),
                       " is not inside the stored chunk of shape ", tensor::to_text(chunk.box.sizes)));
  }
  if (memory.sizes != box.sizes || memory.dtype != chunk.record.stored_dtype) {
    return refuse(text("wanted ", tensor::to_text(box.sizes), ", got memory of ", tensor::to_text(memory.sizes)));
  }
  const int64_t itemsize = tensor::find_dtype(chunk.record.stored_dtype)->itemsize_bytes;
  wanted_.push_back({chunk.record.file, chunk.record.data_offset, chunk.box.sizes, box, itemsize});
  destinations_.push_back({tensor::BoxRuns(chunk.box.sizes, box, itemsize, memory.strides_bytes), memory.data});
  return Status::ok();
}

Status LoadJob::add_bytes(const format::Record& record, uint8_t* memory) {
  const tensor::Dims sizes = {record.bytes};
  wanted_.push_back({record.file, record.offset, sizes, tensor::whole(sizes), 1});
  destinations_.push_back({tensor::BoxRuns(sizes, tensor::whole(sizes), 1, {1}), memory});
  return Status::ok();
}

base::Result<LoadStats> LoadJob::run(const std::function<bool()>& cancelled) {
  const auto begin = std::chrono::steady_clock::now();
  BCP_ASSIGN_OR_RETURN(const planner::LoadPlan plan,
                       planner::plan_load(wanted_, format::kBlockBytes, staging::kSlotBytes));
  Status outcome = execute(plan, cancelled);
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
  while (const auto filled = reader.next()) {
    BCP_RETURN_IF_ERROR(filled->status);
    if (cancelled()) return Status::make(Code::kCancelled, text("load(", options_.directory, "): interrupted"));
    const size_t tag = filled->request.tag;
    BCP_RETURN_IF_ERROR(deliver(ring->slot(filled->slot), source.segment(tag), *source.open_file(tag)));
    reader.release(filled->slot);
  }
  return Status::ok();
}

Status LoadJob::deliver(const uint8_t* slot, const planner::ReadSegment& segment, const OpenFile& file) {
  const int64_t end = std::min(segment.offset + segment.bytes, file.end_of_records);
  for (int64_t begin = segment.offset; options_.verify && begin < end; begin += format::kBlockBytes) {
    const int64_t size = std::min(format::kBlockBytes, end - begin);
    const uint32_t computed = base::crc32(0, slot + (begin - segment.offset), static_cast<size_t>(size));
    const uint32_t stored = file.table[static_cast<size_t>(begin / format::kBlockBytes)];
    if (computed != stored) {
      return Status::make(Code::kCorrupt,
                          text("read(", file.path, ", offset=", begin, ", ", size, " bytes): block has CRC ", computed,
                               ", stored ", stored),
                          file.path);
    }
  }
  for (const uint32_t index : segment.wanted) {
    // The window in bytes of the chunk; a chunk may begin behind the segment's start or end before its end.
    const int64_t data_offset = wanted_[index].data_offset;
    if (data_offset + destinations_[index].runs.end() > file.end_of_records) {
      return Source::behind_the_records(file, data_offset);
    }
    const int64_t from = std::max(segment.offset, data_offset);
    if (from >= end) continue;
    staging::scatter_window(destinations_[index].runs, slot + (from - segment.offset), from - data_offset,
                            end - data_offset, destinations_[index].memory);
  }
  return Status::ok();
}

Status LoadJob::explain(Status failure) const {
  if (failure.code() != Code::kCorrupt && failure.sys_errno() != ENOENT) return failure;
  const auto current = open_checkpoint(options_.directory);
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
