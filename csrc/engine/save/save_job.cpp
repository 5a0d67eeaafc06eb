// SPDX-License-Identifier: Apache-2.0
#include "csrc/engine/save/save_job.h"

#include <algorithm>
#include <chrono>
#include <thread>
#include <utility>

#include "csrc/base/failpoint.h"
#include "csrc/base/named_thread.h"
#include "csrc/base/niceness.h"
#include "csrc/engine/random_id.h"
#include "csrc/io/directory.h"
#include "csrc/io/file_system.h"
#include "csrc/io/late_changes.h"
#include "csrc/staging/staged_bytes.h"
#include "csrc/staging/view_hash.h"

namespace bytecheckpoint::engine {
namespace {

/// Most files that are complete and still open. A process has few descriptors, and a save of many tensors may have many
/// files.
constexpr size_t kMaxUnsettled = 64;

/// Where several files are written, a save has at most so many large ones, and none ends before it has so many bytes.
constexpr int64_t kFilesAtOnce = 16;
constexpr int64_t kEnoughBytes = 64 << 20;
/// How many times as many threads write there.
constexpr int kThreadsThere = 2;

/// Room for what a file has beside its records: padding, block table and trailer.
int64_t overhead_bytes(int64_t file_bytes) {
  return (64 << 10) + file_bytes / format::kBlockBytes * static_cast<int64_t>(sizeof(uint32_t));
}

/// Adds its lifetime to a counter of seconds, and to a lane, if there is one.
class Stopwatch {
 public:
  explicit Stopwatch(double* seconds) : Stopwatch(seconds, nullptr, base::Phase::kCopy) {}
  Stopwatch(double* seconds, base::TraceLane* lane, base::Phase phase) : seconds_(seconds), timer_(lane, phase) {}
  ~Stopwatch() { *seconds_ += static_cast<double>(ns()) / 1e9; }
  int64_t ns() const { return base::now_ns() - begin_ns_; }

 private:
  double* seconds_;
  const base::SpanTimer timer_;
  const int64_t begin_ns_ = base::now_ns();
};

}  // namespace

base::Result<std::unique_ptr<SaveJob>> SaveJob::start(SaveOptions options) {
  if (options.has_hashes && !base::has_content_hash()) {
    return base::Status::make(base::Code::kUnsupported, "save: no library of hashes is loaded in this process");
  }
  BCP_ASSIGN_OR_RETURN(staging::BorrowedRing ring, staging::BorrowedRing::borrow(options.ring_bytes));
  return std::unique_ptr<SaveJob>(new SaveJob(std::move(options), std::move(ring)));
}

SaveJob::SaveJob(SaveOptions options, staging::BorrowedRing ring)
    : options_(std::move(options)),
      lane_(base::lane_of(options_.trace, "fill")),
      ring_(std::move(ring)),
      free_slots_(static_cast<size_t>(ring_->num_slots())),
      deadline_(options_.io_timeout_s) {
  for (int slot = 0; slot < ring_->num_slots(); ++slot) free_slots_.push(slot);
  if (options_.has_hashes) hasher_.emplace();
  const io::WriterOptions writing{options_.num_io_threads, static_cast<size_t>(ring_->num_slots()),
                                  options_.niceness,       options_.bytes_per_s,
                                  options_.io_timeout_s,   options_.trace};
  writer_ = std::make_unique<io::Writer>(writing, [this](int slot) { free_slots_.push(slot); });
}

SaveJob::~SaveJob() = default;

bool SaveJob::is_too_long(int64_t file_bytes) const {
  return options_.max_file_bytes > 0 && file_bytes + overhead_bytes(file_bytes) > options_.max_file_bytes;
}

base::Result<FileImage*> SaveJob::image_for_record(int64_t bytes) {
  if (is_too_long(bytes)) {
    return base::Status::make(base::Code::kUnsupported,
                              base::text("write(", options_.directory, "): ", bytes, " bytes in one piece; ",
                                         "a file there can have ", options_.max_file_bytes, " bytes: shard the tensor"),
                              options_.directory);
  }
  const bool is_full = image_open_ && (options_.one_file_a_record || is_too_long(images_.back()->position() + bytes) ||
                                       is_enough(images_.back()->position()));
  if (is_full) {
    BCP_RETURN_IF_ERROR(finish_image());
    if (enough_bytes_ > 0 && options_.sync) images_.back()->sync_early();
  }
  if (!image_open_) BCP_RETURN_IF_ERROR(create_image());
  FileImage* image = images_.back().get();
  BCP_RETURN_IF_ERROR(image->pad_to(format::kRecordAlignment));
  return image;
}

base::Status SaveJob::create_image() {
  format::DataFileId id;
  BCP_ASSIGN_OR_RETURN(id.file_id, draw_id());
  id.rank = options_.rank;
  id.number = static_cast<uint32_t>(images_.size());
  // Noted before the call: if it creates the file and then fails, the clean-up must find the file.
  file_names_.push_back(format::data_file_name(id));
  std::unique_ptr<FileImage> image;
  const auto create = [&]() -> base::Status {
    BCP_ASSIGN_OR_RETURN(image, FileImage::create(options_.directory, id, options_.direct_io, options_.is_plain,
                                                  {&*ring_, &free_slots_, writer_.get(), &deadline_, lane_,
                                                   options_.bytes_per_s > 0 ? 0 : options_.num_io_threads}));
    return base::Status::ok();
  };
  // The coordinator has made the directory; this machine may see it late.
  BCP_RETURN_IF_ERROR(io::ask_until_seen(options_.directory, options_.visibility_timeout_s, create));
  images_.push_back(std::move(image));
  image_open_ = true;
  if (images_.size() > 1) return base::Status::ok();
  FileImage* const first = images_.back().get();
  const int64_t expected = std::max<int64_t>(options_.expected_bytes - linked_.bytes_in_use(), 0);
  BCP_RETURN_IF_ERROR(deadline_.run("fallocate", options_.directory, [this, first, expected] {
    const io::DiskFile* const file = first->file().on_disk();
    if (file != nullptr && !file->is_direct() && io::is_in_user_space(file->fd())) {
      enough_bytes_ = std::max(kEnoughBytes, expected / kFilesAtOnce);
    }
    return options_.one_file_a_record || enough_bytes_ > 0 ? io::check_room(options_.directory, expected)
                                                           : first->reserve(expected);
  }));
  if (enough_bytes_ > 0) writer_->add_threads((kThreadsThere - 1) * options_.num_io_threads);
  BCP_FAILPOINT(kWriteFileReserved);
  return base::Status::ok();
}

base::Status SaveJob::finish_image() {
  if (!image_open_) return base::Status::ok();
  image_open_ = false;
  return images_.back()->finish_records();
}

void SaveJob::note(const std::string& fqn, const tensor::Box& box, const format::Record& record) {
  result_.records.push_back({fqn, box, record});
  result_.records.back().record.file = static_cast<uint32_t>(images_.size() - 1);
  ++stats_.num_records;
}

void SaveJob::note_hash(const base::ContentHash& hash, const tensor::StridedView& view) {
  const format::WrittenRecord& written = result_.records.back();
  saved_.records[written.fqn].push_back({written.box, written.record, hash, staging::hash_sample(view)});
}

template <class AppendData>
base::Status SaveJob::append_record(const std::string& fqn, const tensor::Box& box, tensor::DType dtype,
                                    const AppendData& append_data) {
  BCP_RETURN_IF_ERROR(settle_if_many());
  const Stopwatch watch(&stats_.stage_s);
  BCP_ASSIGN_OR_RETURN(const format::RecordExtent extent, format::ZipRecord::measure(dtype, box.sizes, 0));
  BCP_ASSIGN_OR_RETURN(FileImage * image, image_for_record(extent.record_bytes));
  BCP_ASSIGN_OR_RETURN(const format::ZipRecord* zip, layouts_.find(dtype, box.sizes, image->position()));
  uint32_t data_crc = 0;
  BCP_RETURN_IF_ERROR(image->append(zip->head()));
  BCP_RETURN_IF_ERROR(append_data(image, zip->data_bytes(), &data_crc));
  BCP_RETURN_IF_ERROR(image->append(zip->tail(data_crc)));
  if (lane_ != nullptr) lane_->count_size(base::Phase::kCopy, zip->data_bytes(), watch.ns());
  note(fqn, box,
       {format::RecordKind::kTensor, dtype, 0, zip->record_offset(), zip->record_bytes(), zip->data_offset(),
        zip->data_bytes()});
  return base::Status::ok();
}

base::Status SaveJob::append_tensor(const std::string& fqn, const tensor::Box& box, const tensor::StridedView& view) {
  std::optional<base::ContentHash> hash;
  BCP_RETURN_IF_ERROR(append_record(fqn, box, view.dtype, [&](FileImage* image, int64_t bytes, uint32_t* crc) {
    // A view of a part of a staged tensor, or one in another order, is checked here, before it is copied. A whole
    // staged tensor has a CRC to compare below.
    const staging::KnownBytes known = staging::find_staged(view);
    BCP_RETURN_IF_ERROR(known.status);
    hash = known.hash;
    image->hash_with(hasher_.has_value() && !hash.has_value() ? &*hasher_ : nullptr);
    base::Status appended = known.crc.has_value() && bytes >= format::kLargeDataBytes
                                ? image->append_borrowed(view.data, bytes, crc)
                                : image->append_elements(view, bytes, crc);
    image->hash_with(nullptr);
    BCP_RETURN_IF_ERROR(std::move(appended));
    return known.crc.has_value() && *known.crc != *crc ? staging::changed_since_staged(*known.crc, *crc)
                                                       : base::Status::ok();
  }));
  if (hasher_.has_value()) note_hash(hash.has_value() ? *hash : hasher_->end(), view);
  return base::Status::ok();
}

base::Status SaveJob::append_from_devices(std::vector<const TensorToWrite*> tensors, staging::DeviceCopies* copies) {
  if (tensors.empty()) return base::Status::ok();
  ring_->pin(copies->any_device());
  // Device by device: a copy may clear what is between two tensors of its device.
  std::stable_sort(tensors.begin(), tensors.end(),
                   [](const TensorToWrite* a, const TensorToWrite* b) { return a->device < b->device; });
  std::vector<RecordToFill> records;
  for (const TensorToWrite* each : tensors) {
    records.push_back({each->fqn, each->box, format::RecordKind::kTensor, each->view.dtype, 0});
  }
  int64_t bytes = 0;
  size_t first = 0, last = 0;  // of the tensors that the next run copies
  const RecordSource source{
      [&](size_t r, int64_t begin, int64_t end, uint8_t* to) {
        if (std::exchange(bytes, bytes + end - begin) == 0) first = r;
        last = r;
        return copies->add(tensors[r]->device, tensors[r]->view, begin, end, to);
      },
      [&] {
        const base::SpanTimer timer(lane_, base::Phase::kCopy, std::exchange(bytes, 0));
        base::Status copied = copies->gather();
        if (copied.is_ok()) return copied;
        const std::string to = first == last ? "" : " to '" + *tensors[last]->fqn + "'";
        return std::move(copied).with_context(base::text("while saving '", *tensors[first]->fqn, "'", to));
      },
      /*slots_a_run=*/1};  // a link begins at once, unlike a disk, and the writer gets slots sooner
  base::Status outcome = append_filled(records, source);
  if (!outcome.is_ok()) copies->clear();
  return outcome;
}

base::Result<size_t> SaveJob::end_of_file(const std::vector<RecordToFill>& records, size_t first,
                                          int64_t position) const {
  if (options_.one_file_a_record) return first + 1;
  if (options_.max_file_bytes == 0 && enough_bytes_ == 0) return records.size();
  for (size_t r = first; r < records.size(); ++r) {
    const int64_t begin = base::align_up(position, format::kRecordAlignment);
    BCP_ASSIGN_OR_RETURN(const format::RecordExtent extent, records[r].extent_at(begin));
    position = begin + extent.record_bytes;
    if (r > first && (is_too_long(position) || is_enough(begin))) return r;
  }
  return records.size();
}

base::Status SaveJob::append_filled(const std::vector<RecordToFill>& records, const RecordSource& source) {
  const Stopwatch watch(&stats_.stage_s);
  if (records.empty()) return image_for_record(0).status();  // a file without records
  for (size_t first = 0, behind = 0; first < records.size(); first = behind) {
    BCP_RETURN_IF_ERROR(settle_if_many());
    BCP_ASSIGN_OR_RETURN(const format::RecordExtent extent, records[first].extent_at(0));
    base::Result<FileImage*> file = image_for_record(extent.record_bytes);
    if (!file.is_ok()) return file.status().with_context("while saving '" + *records[first].fqn + "'");
    FileImage* const image = file.value();
    BCP_ASSIGN_OR_RETURN(behind, end_of_file(records, first, image->position()));
    BCP_ASSIGN_OR_RETURN(FilledRecords filled, FilledRecords::lay_out(records, first, behind, image->position()));
    while (!filled.is_done()) {
      int64_t limit = 0;
      for (int slots = source.slots_a_run; limit == 0 || filled.needs_more_than(limit); ++slots) {
        BCP_ASSIGN_OR_RETURN(limit, image->take_slots(filled.end(), slots));
      }
      BCP_RETURN_IF_ERROR(filled.want_until(limit, *image, source));
      BCP_RETURN_IF_ERROR(source.run());
      BCP_RETURN_IF_ERROR(filled.append_until(
          limit, image,
          [&](const RecordToFill& record, const format::Record& written) { note(*record.fqn, *record.box, written); }));
    }
  }
  return base::Status::ok();
}

base::Status SaveJob::append_tensors(const std::vector<TensorToWrite>& tensors, staging::DeviceCopies* copies) {
  std::vector<const TensorToWrite*> on_devices;
  const auto append_all = [&] {
    for (const TensorToWrite& each : tensors) {
      if (each.device != staging::kHost) {
        on_devices.push_back(&each);
        continue;
      }
      base::Status outcome = append_tensor(*each.fqn, *each.box, each.view);
      if (!outcome.is_ok()) return std::move(outcome).with_context("while saving '" + *each.fqn + "'");
    }
    return append_from_devices(std::move(on_devices), copies);
  };
  if (options_.niceness == 0) return append_all();
  base::Status outcome;
  base::named_thread("bcp-append", [&] {
    base::add_niceness(options_.niceness);
    outcome = append_all();
  }).join();
  return outcome;
}

base::Status SaveJob::append_all(std::vector<TensorToWrite> tensors, staging::DeviceCopies* copies) {
  if (options_.last == nullptr || options_.last->directory == options_.directory) {
    return append_tensors(tensors, copies);
  }
  Unchanged unchanged = find_unchanged(tensors, *options_.last, options_.num_io_threads);
  stats_.bytes_compared = unchanged.bytes_read;
  std::vector<const SavedRecord*> left = unchanged.records;
  linked_.link({options_.directory, options_.sync, options_.visibility_timeout_s}, *options_.last, options_.link_rule,
               tensors, &left, &deadline_);
  std::vector<TensorToWrite> of_old, of_new;
  for (size_t t = 0; t < tensors.size(); ++t) {
    if (left[t] != nullptr) {
      of_old.push_back(std::move(tensors[t]));
    } else if (unchanged.records[t] == nullptr) {
      of_new.push_back(std::move(tensors[t]));
    }
  }
  if (!of_old.empty()) BCP_RETURN_IF_ERROR(append_tensors(of_old, copies));
  if (!of_old.empty() && !of_new.empty()) BCP_RETURN_IF_ERROR(finish_image());
  return append_tensors(of_new, copies);
}

base::Status SaveJob::append_bytes(const std::string& fqn, std::string_view bytes) {
  return append_as_is(format::RecordKind::kBytes, fqn, {}, bytes);
}

base::Status SaveJob::append_opaque(const std::string& fqn, const tensor::Box& box, std::string_view archive) {
  return append_as_is(format::RecordKind::kOpaque, fqn, box, archive);
}

base::Status SaveJob::append_as_is(format::RecordKind kind, const std::string& fqn, const tensor::Box& box,
                                   std::string_view bytes) {
  BCP_RETURN_IF_ERROR(settle_if_many());
  const Stopwatch watch(&stats_.stage_s);
  BCP_ASSIGN_OR_RETURN(FileImage * image, image_for_record(static_cast<int64_t>(bytes.size())));
  const int64_t offset = image->position();
  BCP_RETURN_IF_ERROR(image->append(bytes));
  note(fqn, box, {kind, tensor::DType::kNone, 0, offset, static_cast<int64_t>(bytes.size()), 0, 0});
  return base::Status::ok();
}

base::Result<format::WriteResult> SaveJob::finish() {
  BCP_RETURN_IF_ERROR(finish_image());
  {
    const Stopwatch watch(&stats_.flush_s, lane_, base::Phase::kFlush);
    BCP_RETURN_IF_ERROR(writer_->finish());
  }
  BCP_FAILPOINT(kWriteDataDone);
  const Stopwatch watch(&stats_.sync_s, lane_, base::Phase::kSync);
  BCP_RETURN_IF_ERROR(deadline_.run("fsync", options_.directory, [this] { return settle_all(); }));
  for (const auto& image : images_) {
    result_.files.push_back(image->entry());
    stats_.bytes_written += image->entry().bytes;
    saved_.files.push_back({image->entry(), 0, 0});
  }
  for (const format::WrittenRecord& written : result_.records) {
    if (written.record.kind == format::RecordKind::kTensor) ++saved_.files[written.record.file].num_tensors;
  }
  saved_.directory = options_.directory;
  const size_t num_written = result_.records.size();
  linked_.add_to(&result_, &saved_);
  stats_.bytes_linked = linked_.num_bytes();
  stats_.num_records += static_cast<int64_t>(result_.records.size() - num_written);
  return std::move(result_);
}

base::Status SaveJob::settle_if_many() {
  if (images_.size() <= num_settled_ + kMaxUnsettled) return base::Status::ok();
  {
    const Stopwatch watch(&stats_.flush_s, lane_, base::Phase::kFlush);
    BCP_RETURN_IF_ERROR(writer_->drain());
  }
  const Stopwatch watch(&stats_.sync_s, lane_, base::Phase::kSync);
  return deadline_.run("fsync", options_.directory, [this] { return settle_finished(); });
}

base::Status SaveJob::settle_finished() {
  for (const size_t end = images_.size() - (image_open_ ? 1 : 0); num_settled_ < end; ++num_settled_) {
    BCP_RETURN_IF_ERROR(images_[num_settled_]->settle(options_.sync));
    deadline_.answered();
  }
  return base::Status::ok();
}

base::Status SaveJob::settle_all() {
  BCP_RETURN_IF_ERROR(settle_finished());
  BCP_FAILPOINT(kWriteFilesSynced);
  if (options_.sync && !(images_.empty() && linked_.is_empty()))
    BCP_RETURN_IF_ERROR(io::sync_directory(options_.directory));
  BCP_FAILPOINT(kWriteDirectorySynced);
  return base::Status::ok();
}

}  // namespace bytecheckpoint::engine
