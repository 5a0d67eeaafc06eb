// SPDX-License-Identifier: Apache-2.0
#include "csrc/engine/check/verify_job.h"

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <memory>
#include <optional>
#include <thread>

#include "csrc/base/named_thread.h"
#include "csrc/engine/check/foreign_check.h"
#include "csrc/engine/check/unreferenced.h"
#include "csrc/engine/coverage.h"
#include "csrc/engine/names.h"
#include "csrc/engine/open/open_any_checkpoint.h"
#include "csrc/engine/open/open_checkpoint.h"
#include "csrc/engine/open/planned_files.h"
#include "csrc/format/dcp/compare_metadata.h"
#include "csrc/format/manifest/metadata_file.h"
#include "csrc/io/directory.h"
#include "csrc/io/reader.h"
#include "csrc/staging/slot_ring.h"

namespace bytecheckpoint::engine {
namespace {

using base::Code;
using base::Status;
using base::text;

/// Hands out the segments of all files, one after the other. Not thread-safe.
class Segments {
 public:
  /// \param open  Called to open each file when its turn comes.
  Segments(const std::vector<std::unique_ptr<FileCheck>>& files, std::function<Status(FileCheck*)> open)
      : files_(files), open_(std::move(open)) {}

  base::Result<std::optional<io::ReadRequest>> next() {
    for (; file_ < files_.size(); ++file_, offset_ = -1) {
      FileCheck& file = *files_[file_];
      if (offset_ < 0) {
        BCP_RETURN_IF_ERROR(open_(&file));
        offset_ = 0;
        end_ = file.end_of_records();
        opened_ = file.file();
      }
      if (offset_ >= end_ || file.has_missed()) continue;
      io::ReadRequest segment;
      segment.file = opened_;
      segment.offset = offset_;
      segment.wanted = std::min(staging::kSlotBytes, end_ - offset_);
      segment.size = base::align_up(segment.wanted, io::kDirectAlignment);
      segment.tag = file_;
      offset_ += segment.wanted;
      return std::optional<io::ReadRequest>(std::move(segment));
    }
    opened_.reset();
    return std::optional<io::ReadRequest>();
  }

  bool is_at_end() const { return file_ == files_.size(); }
  void stop() { file_ = files_.size(); }

 private:
  const std::vector<std::unique_ptr<FileCheck>>& files_;
  const std::function<Status(FileCheck*)> open_;
  size_t file_ = 0;
  int64_t offset_ = -1;  // -1: not opened yet
  int64_t end_ = 0;
  std::shared_ptr<io::File> opened_;
};

/// Verifies one checkpoint: the metadata of one commit mark and the files that it names.
class Verifier {
 public:
  /// \param parts  Collects the items of each part if ranks saved on their own; null for a checkpoint of all ranks.
  Verifier(const VerifyOptions& options, const std::function<bool(int64_t, int64_t)>& progress, PartsCoverage* parts,
           VerifyReport* report)
      : options_(options), progress_(progress), parts_(parts), report_(report) {}

  Status verify(Scope scope) {
    BCP_ASSIGN_OR_RETURN(const std::optional<format::Manifest> readable, read_metadata(scope));
    if (!readable.has_value()) return Status::ok();
    const format::Manifest& manifest = *readable;
    if (manifest.foreign.has_value()) return verify_foreign(manifest, scope);
    report_->save_ids.push_back(base::to_hex(manifest.save_id));
    check_coverage(manifest, scope);
    std::vector<std::vector<FileCheck::Record>> records(manifest.files.size());
    for (const format::Item& item : manifest.items) {
      for (const format::Chunk& chunk : item.chunks) records[chunk.record.file].push_back({&item, &chunk});
    }
    std::vector<std::unique_ptr<FileCheck>> files;
    for (size_t f = 0; f < manifest.files.size(); ++f) {
      report_->num_records += static_cast<int64_t>(records[f].size());
      bytes_total_ += manifest.files[f].bytes;
      files.push_back(std::make_unique<FileCheck>(manifest.files[f], std::move(records[f])));
    }
    report_->num_files += static_cast<int64_t>(files.size());
    BCP_RETURN_IF_ERROR(read_all(manifest, files));
    report_->bytes_checked += bytes_checked_;
    for (const auto& file : files) {
      for (Problem& problem : file->take_problems()) add(std::move(problem));
    }
    if (report_->problems.empty()) return Status::ok();
    return look_for_a_newer_commit(scope, manifest.save_id);
  }

  /// Verifies what another writer made, be it a checkpoint or files that have no metadata.
  Status verify_foreign(const format::Manifest& manifest, Scope scope) {
    check_coverage(manifest, scope);
    const std::string directory = manifest.data_directory(options_.directory);
    BCP_ASSIGN_OR_RETURN(ForeignCheck check,
                         check_foreign_records(directory, manifest, options_.num_threads, progress_));
    report_->num_files += static_cast<int64_t>(manifest.files.size());
    report_->num_records += check.num_records;
    report_->bytes_checked += check.bytes_checked;
    report_->bytes_unchecked += check.bytes_unchecked;
    for (Problem& problem : check.problems) add(std::move(problem));
    return check_all_unchanged(directory, manifest);  // else what was found may be of two checkpoints
  }

 private:
  bool is_full() const { return report_->problems.size() >= kMaxProblems; }

  void add(Problem problem) {
    if (!is_full()) report_->problems.push_back(std::move(problem));
  }

  /// Returns nothing if the metadata is damaged, which is then reported as a problem.
  base::Result<std::optional<format::Manifest>> read_metadata(Scope scope) {
    BCP_ASSIGN_OR_RETURN(const Mark mark, read_mark(options_.directory, scope));
    base::Result<format::Manifest> manifest = decode_mark(options_.directory, mark, {scope, /*check_pickle=*/true});
    if (!manifest.is_ok()) {
      const Status fault = manifest.status();
      if (fault.code() != Code::kCorrupt && fault.code() != Code::kVersion) return fault;
      add({mark_name(scope), "metadata", fault.offset(), fault.num_bytes(), {}, fault.message()});
      return std::optional<format::Manifest>();
    }
    if (manifest.value().foreign.has_value()) return std::make_optional(std::move(manifest.value()));
    BCP_ASSIGN_OR_RETURN(const std::string_view pickle, format::pickle_part(mark.bytes));
    const std::string difference = format::compare_metadata(pickle, manifest.value());
    if (!difference.empty()) add({mark_name(scope), "metadata", -1, -1, {}, difference});
    return std::make_optional(std::move(manifest.value()));
  }

  void check_coverage(const format::Manifest& manifest, Scope scope) {
    CoverageCheck check;
    for (const format::Item& item : manifest.items) {
      if (parts_ != nullptr) {
        parts_->add(item);
      } else if (std::string fault = check.fault(item); !fault.empty()) {
        add({mark_name(scope), "metadata", -1, -1, {item.fqn}, std::move(fault)});
      }
    }
  }

  Status read_all(const format::Manifest& manifest, const std::vector<std::unique_ptr<FileCheck>>& files) {
    BCP_ASSIGN_OR_RETURN(const staging::BorrowedRing ring, staging::BorrowedRing::borrow(options_.ring_bytes));
    int64_t num_segments = 0;
    for (const auto& file : files) num_segments += file->entry().bytes / staging::kSlotBytes + 1;
    const auto num_threads =
        static_cast<int>(std::max<int64_t>(1, std::min<int64_t>(options_.num_threads, num_segments)));
    Segments segments(files, [&](FileCheck* file) { return open(manifest, file); });
    // A failure ends the reader thread that met it. When all threads have ended, a new reader goes on behind the
    // failures.
    while (!segments.is_at_end()) {
      const auto next = [&]() -> base::Result<std::optional<io::ReadRequest>> {
        if (is_cancelled_) segments.stop();
        return segments.next();
      };
      io::Reader reader(num_threads, ring->num_slots(), next, [&](int slot) { return ring->slot(slot); });
      std::vector<Status> faults(static_cast<size_t>(num_threads));
      std::atomic<size_t> thread{0};
      base::work_together("bcp-verify", faults.size(), [&, caller = std::this_thread::get_id()] {
        check_all(&reader, *ring, files, /*tells=*/std::this_thread::get_id() == caller, &faults[thread++]);
      });
      for (const Status& fault : faults) BCP_RETURN_IF_ERROR(fault);
      if (is_cancelled_ || !progress_(bytes_done_, bytes_total_)) {
        return Status::make(Code::kCancelled, text("verify(", options_.directory, "): interrupted"));
      }
    }
    return Status::ok();
  }

  /// Computes CRCs until all is read. \param fault  Receives an error that is no damage; after it nothing more is
  /// looked at.
  void check_all(io::Reader* reader, const staging::SlotRing& ring,
                 const std::vector<std::unique_ptr<FileCheck>>& files, bool tells, Status* fault) {
    while (const auto filled = reader->next()) {
      if (filled->slot < 0 && !filled->request.file) {
        *fault = filled->status;
        is_cancelled_ = true;
        continue;
      }
      const io::ReadRequest& segment = filled->request;
      FileCheck& file = *files[segment.tag];
      bytes_done_ += segment.wanted;
      if (!filled->status.is_ok()) {
        file.miss(filled->status);
        continue;
      }
      if (!is_cancelled_) file.look_at(segment.offset, segment.wanted, ring.slot(filled->slot));
      bytes_checked_ += segment.wanted;
      reader->release(filled->slot);
      if (tells && !is_cancelled_ && !progress_(bytes_done_, bytes_total_)) is_cancelled_ = true;
    }
  }

  Status open(const format::Manifest& manifest, FileCheck* file) {
    BCP_RETURN_IF_ERROR(file->open(options_.directory, manifest, options_.direct_io));
    // Opening has checked all that is behind the records. If the file could not be opened, all its bytes count as done.
    const int64_t bytes = file->entry().bytes - file->end_of_records();
    bytes_done_ += bytes;
    if (file->file() != nullptr) bytes_checked_ += bytes;
    return Status::ok();
  }

  /// Problems do not count if the checkpoint was replaced or removed while it was read: then returns kChanged or
  /// kNotFound.
  Status look_for_a_newer_commit(Scope scope, const base::Id& save_id) const {
    const auto current = open_checkpoint(options_.directory, {scope});
    if (!current.is_ok() && current.status().code() == Code::kNotFound) {
      const Status removed = explain_removed("verify", options_.directory, scope, current.status());
      if (removed.code() == Code::kNotFound) return removed;
    }
    if (!current.is_ok() || current.value().save_id == save_id) return Status::ok();
    return Status::make(
        Code::kChanged,
        text("verify(", options_.directory, "): a newer commit replaced the checkpoint while it was read"),
        options_.directory);
  }

  const VerifyOptions& options_;
  const std::function<bool(int64_t, int64_t)>& progress_;
  PartsCoverage* parts_;
  VerifyReport* report_;
  int64_t bytes_total_ = 0;
  std::atomic<int64_t> bytes_done_{0};
  std::atomic<int64_t> bytes_checked_{0};
  std::atomic<bool> is_cancelled_{false};
};

/// Verifies safetensors or files of torch.save, which have no metadata. \param opened  They, or why they cannot be
/// read.
base::Result<VerifyReport> verify_files(const VerifyOptions& options,
                                        const std::function<bool(int64_t, int64_t)>& progress,
                                        const base::Result<format::Manifest>& opened) {
  VerifyReport report;
  if (opened.is_ok()) {
    BCP_RETURN_IF_ERROR(Verifier(options, progress, nullptr, &report).verify_foreign(opened.value(), {}));
    if (report.bytes_checked == 0) {
      report.notes.push_back(text("files of ", opened.value().foreign->format,
                                  " have no checksums: headers, sizes and the index were checked, the elements were "
                                  "not"));
    }
    return report;
  }
  const Status fault = opened.status();
  if (fault.code() != Code::kCorrupt) return fault;
  report.problems.push_back(
      {io::name_of(fault.path()), "file", fault.offset(), fault.num_bytes(), {}, fault.message()});
  return report;
}

}  // namespace

base::Result<VerifyReport> verify_checkpoint(const VerifyOptions& options,
                                             const std::function<bool(int64_t, int64_t)>& progress) {
  VerifyReport report;
  std::vector<Scope> scopes;
  const auto mark = io::entry_type(io::join(options.directory, std::string(kMetadataName)));
  if (!mark.is_ok() && mark.status().sys_errno() != ENOTDIR) return mark.status();
  const bool is_absent = !mark.is_ok() || mark.value() == io::EntryType::kAbsent;
  if (is_absent) {
    const auto names = io::list_directory(options.directory);
    for (const std::string& name : names.is_ok() ? names.value() : std::vector<std::string>()) {
      uint32_t rank;
      if (is_rank_metadata_name(name, &rank)) scopes.push_back(rank);
    }
    std::sort(scopes.begin(), scopes.end());
  }
  if (scopes.empty() && is_absent) {
    const auto other = open_any_checkpoint(options.directory);
    // A save may have committed since its mark was looked for.
    const bool is_ours = other.is_ok() && !other.value().foreign.has_value();
    const bool is_nothing = !other.is_ok() && other.status().code() == Code::kNotFound;
    if (!is_ours && !is_nothing) return verify_files(options, progress, other);
  }
  if (scopes.empty()) scopes.push_back({});
  PartsCoverage parts;
  for (const Scope scope : scopes) {
    BCP_RETURN_IF_ERROR(Verifier(options, progress, scope.has_value() ? &parts : nullptr, &report).verify(scope));
  }
  for (auto& [fqn, fault] : parts.faults()) {
    if (report.problems.size() >= kMaxProblems) break;
    report.problems.push_back({mark_name(scopes.front()), "metadata", -1, -1, {fqn}, std::move(fault)});
  }
  // Last, when a save that had just committed at the beginning is over.
  BCP_ASSIGN_OR_RETURN(Unreferenced unreferenced, find_unreferenced(options.directory));
  report.unreferenced = std::move(unreferenced.files);
  report.notes = std::move(unreferenced.notes);
  return report;
}

}  // namespace bytecheckpoint::engine
