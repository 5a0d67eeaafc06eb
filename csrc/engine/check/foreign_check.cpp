// SPDX-License-Identifier: Apache-2.0
#include "csrc/engine/check/foreign_check.h"

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <optional>
#include <thread>
#include <tuple>

#include "csrc/base/bytes.h"
#include "csrc/base/crc32.h"
#include "csrc/base/mutex.h"
#include "csrc/base/named_thread.h"
#include "csrc/engine/open/planned_files.h"
#include "csrc/format/archive/zip_directory.h"
#include "csrc/io/file.h"

namespace bytecheckpoint::engine {
namespace {

using base::Code;
using base::Status;
using base::text;

constexpr int64_t kReadBytes = 4 << 20;
/// As much of the directory of a file of torch.save as opening the file reads.
constexpr int64_t kMostDirectoryBytes = 256 << 20;

/// An entry of a file of torch.save.
struct Stretch {
  format::StoredCrc stored;
  std::string entry;
};

/// One record, and the first item that names it.
struct NamedRecord {
  const format::Item* item;
  const format::Record* record;
};

auto extent_of(const NamedRecord& named) {
  return std::make_tuple(named.record->file, named.record->offset, named.record->bytes);
}

class ForeignChecker {
 public:
  ForeignChecker(const std::string& directory, const format::Manifest& manifest,
                 const std::function<bool(int64_t, int64_t)>& progress)
      : directory_(directory),
        manifest_(manifest),
        is_of_torch_(manifest.foreign->format == std::string_view("torch")),
        progress_(progress),
        caller_(std::this_thread::get_id()) {
    for (const format::Item& item : manifest.items) {
      for (const format::Chunk& chunk : item.chunks) list(item, chunk.record);
    }
    std::stable_sort(records_.begin(), records_.end(),
                     [](const auto& a, const auto& b) { return extent_of(a) < extent_of(b); });
    const auto same = [](const auto& a, const auto& b) { return extent_of(a) == extent_of(b); };
    records_.erase(std::unique(records_.begin(), records_.end(), same), records_.end());
    for (const NamedRecord& named : records_) {
      // No file is so long: that its bytes are missing is reported as a problem.
      if (!base::checked_add(bytes_total_, named.record->bytes, &bytes_total_)) bytes_total_ = INT64_MAX;
    }
  }

  base::Result<ForeignCheck> run(int num_threads) {
    if (is_of_torch_) BCP_RETURN_IF_ERROR(list_entries());
    check_.num_records = static_cast<int64_t>(records_.size() + stretches_.size());
    for (const Stretch& stretch : stretches_) bytes_total_ += stretch.stored.bytes;
    const size_t wanted = std::min(records_.size() + stretches_.size(), static_cast<size_t>(std::max(num_threads, 1)));
    base::work_together("bcp-verify", wanted, [&] { work(); });
    BCP_RETURN_IF_ERROR(failure_);
    if (is_cancelled_ || !progress_(bytes_total_, bytes_total_)) {
      return Status::make(Code::kCancelled, text("verify(", directory_, "): interrupted"));
    }
    std::stable_sort(check_.problems.begin(), check_.problems.end(), [](const Problem& a, const Problem& b) {
      return std::tie(a.file, a.offset) < std::tie(b.file, b.offset);
    });
    return std::move(check_);
  }

 private:
  void list(const format::Item& item, const format::Record& record) {
    using format::RecordKind;
    if (record.kind == RecordKind::kAbsent) {
      add({".metadata", "metadata", -1, -1, {item.fqn}, "the metadata do not say where a chunk is stored"});
    } else if (!is_of_torch_ && record.kind != RecordKind::kInline) {  // else it lies in entries, which are all checked
      records_.push_back({&item, &record});
    }
  }

  /// Lists all entries of files of torch.save: also the storages of values that only torch.load can read, and the
  /// pickle. \returns only errors that are no damage.
  Status list_entries() {
    for (uint32_t number = 0; number < manifest_.files.size(); ++number) {
      io::File file;
      const int64_t file_bytes = open_file(number, &file);
      if (file_bytes < 0) continue;
      const format::ReadBytes read = [&](int64_t offset, int64_t size) { return file.read(offset, size); };
      format::ArchiveReader archive(file_bytes, read);
      const Status fault = list_entries_of(number, &archive);
      if (fault.code() == Code::kCorrupt) {
        add({manifest_.files[number].name, "file", -1, -1, {}, fault.message()});
      } else {
        BCP_RETURN_IF_ERROR(fault);
      }
    }
    const base::MutexLock lock(mutex_);
    return failure_;
  }

  Status list_entries_of(uint32_t number, format::ArchiveReader* archive) {
    BCP_ASSIGN_OR_RETURN(const auto directory, format::read_zip_directory(archive, kMostDirectoryBytes));
    if (!directory.has_value()) return format::corrupt_archive("its directory is too large");
    const bool has_crcs = any_crc(*directory);
    int64_t left = archive->bytes(), unchecked = 0;
    for (const format::ZipEntry& entry : directory->entries) {
      BCP_RETURN_IF_ERROR(format::check_header(entry, archive));
      if (!entry.is_plain || !has_crcs) {
        unchecked += entry.bytes;
        continue;
      }
      BCP_ASSIGN_OR_RETURN(const int64_t offset, format::content_offset(entry, *directory, archive));
      left -= entry.bytes;
      if (left < 0) return format::corrupt_archive("two entries overlap");
      stretches_.push_back({{number, offset, entry.bytes, entry.crc}, std::string(entry.name)});
    }
    const base::MutexLock lock(mutex_);
    check_.bytes_unchecked += unchecked;
    return Status::ok();
  }

  /// With CRCs switched off, torch writes zeros.
  static bool any_crc(const format::ZipDirectory& directory) {
    return std::any_of(directory.entries.begin(), directory.entries.end(),
                       [](const format::ZipEntry& entry) { return entry.crc != 0; });
  }

  void work() {
    std::optional<uint32_t> open;
    io::File file;
    int64_t file_bytes = 0;
    for (size_t i = next_++; i < records_.size() + stretches_.size() && !is_cancelled_; i = next_++) {
      if (i >= records_.size()) {
        note(check_stretch(stretches_[i - records_.size()]));
        continue;
      }
      const NamedRecord& named = records_[i];
      if (open != named.record->file) {
        open = named.record->file;
        file_bytes = open_file(*open, &file);
      }
      const format::Record& record = *named.record;
      if (file_bytes < 0) continue;
      if (record.bytes > file_bytes || record.offset > file_bytes - record.bytes) {
        add(problem(named, "file", record.offset, record.bytes,
                    text("the metadata name a record there, but the file has only ", file_bytes, " bytes")));
      } else {
        note(check(named, &file));
      }
    }
  }

  /// Ends the check if `outcome` is a failure.
  void note(const Status& outcome) {
    if (outcome.is_ok()) return;
    const base::MutexLock lock(mutex_);
    if (failure_.is_ok()) failure_ = outcome;
    is_cancelled_ = true;
  }

  /// Compares an entry of a file of torch.save, such as a storage, with its checksum.
  Status check_stretch(const Stretch& stretch) {
    const format::StoredCrc& stored = stretch.stored;
    const std::string& name = manifest_.files[stored.file].name;
    BCP_ASSIGN_OR_RETURN(io::File file, open_planned(directory_, manifest_.files[stored.file], /*direct=*/false));
    BCP_ASSIGN_OR_RETURN(const std::optional<uint32_t> crc, checksum(stored.offset, stored.bytes, &file));
    if (!crc.has_value()) return Status::ok();
    if (*crc != stored.crc) {
      add({name, "records", stored.offset, stored.bytes, names_in(stored),
           text("entry '", stretch.entry, "': CRC is ", base::crc_text(*crc), ", stored ",
                base::crc_text(stored.crc))});
    }
    const base::MutexLock lock(mutex_);
    check_.bytes_checked += stored.bytes;
    return Status::ok();
  }

  /// Returns the names of the first tensors that lie in a stretch.
  std::vector<std::string> names_in(const format::StoredCrc& stretch) const {
    constexpr size_t kMostNames = 20;
    std::vector<std::string> names;
    for (const format::Item& item : manifest_.items) {
      const bool is_inside =
          item.is_tensor && std::any_of(item.chunks.begin(), item.chunks.end(), [&](const format::Chunk& chunk) {
            const format::Record& record = chunk.record;
            return record.file == stretch.file && record.data_offset >= stretch.offset &&
                   record.data_offset < stretch.offset + stretch.bytes;
          });
      if (is_inside && names.size() < kMostNames) names.push_back(item.fqn);
    }
    return names;
  }

  /// Returns the length of the file, or -1 if it cannot be opened, which is reported once for each file.
  int64_t open_file(uint32_t number, io::File* file) {
    const std::string& name = manifest_.files[number].name;
    base::Result<io::File> opened = open_planned(directory_, manifest_.files[number], /*direct=*/false);
    const base::Result<int64_t> size = opened.is_ok() ? opened.value().size() : base::Result<int64_t>(opened.status());
    if (size.is_ok()) {
      *file = std::move(opened.value());
      return size.value();
    }
    const base::MutexLock lock(mutex_);
    if (size.status().code() == Code::kCorrupt || size.status().sys_errno() == ENOENT) {
      const auto is_told = [&](const Problem& p) { return p.file == name && p.offset < 0; };
      if (std::none_of(check_.problems.begin(), check_.problems.end(), is_told)) {
        check_.problems.push_back({name, "file", -1, -1, {}, size.status().message()});
      }
    } else if (failure_.is_ok()) {
      failure_ = size.status();
      is_cancelled_ = true;
    }
    return -1;
  }

  /// \returns only errors that are no damage.
  Status check(const NamedRecord& named, io::File* file) {
    const format::Record& record = *named.record;
    const format::ReadBytes read = [&](int64_t offset, int64_t size) {
      return file->read(record.offset + offset, size);
    };
    if (manifest_.files[record.file].packing.is_packed()) return unpack(named, file);
    format::ArchiveReader archive(record.bytes, read);
    int64_t checked = 0;
    Status fault;
    const auto directory = format::read_zip_directory(&archive);
    if (!directory.is_ok()) {
      fault = directory.status();
    } else if (directory.value().has_value()) {
      fault = check_entries(named, *directory.value(), &archive, file, &checked);
    }
    if (fault.code() == Code::kStorage) return fault;
    if (fault.code() == Code::kCorrupt) add(problem(named, "records", record.offset, record.bytes, fault.message()));
    bytes_done_ += record.bytes - checked;
    const base::MutexLock lock(mutex_);
    check_.bytes_checked += checked;
    check_.bytes_unchecked += record.bytes - checked;
    return Status::ok();
  }

  /// Finds out whether a record can be unpacked. \returns only errors that are no damage.
  Status unpack(const NamedRecord& named, io::File* file) {
    const format::Record& record = *named.record;
    const Status fault = checksum(record.offset, record.bytes, file).status();
    if (fault.code() == Code::kCorrupt) {
      add(problem(named, "records", record.offset, record.bytes, fault.message()));
    } else {
      BCP_RETURN_IF_ERROR(fault);
    }
    const base::MutexLock lock(mutex_);
    check_.bytes_unchecked += record.bytes;
    return Status::ok();
  }

  /// \returns kCorrupt for an archive that is damaged as a whole.
  Status check_entries(const NamedRecord& named, const format::ZipDirectory& directory, format::ArchiveReader* archive,
                       io::File* file, int64_t* checked) {
    const bool has_crcs = any_crc(directory);
    int64_t left = archive->bytes();
    for (const format::ZipEntry& entry : directory.entries) {
      BCP_RETURN_IF_ERROR(format::check_header(entry, archive));
      if (!entry.is_plain || !has_crcs) continue;
      BCP_ASSIGN_OR_RETURN(const int64_t offset, format::content_offset(entry, directory, archive));
      left -= entry.bytes;
      if (left < 0) return format::corrupt_archive("two entries overlap");
      BCP_ASSIGN_OR_RETURN(const std::optional<uint32_t> crc,
                           checksum(named.record->offset + offset, entry.bytes, file));
      if (!crc.has_value()) return Status::ok();
      *checked += entry.bytes;
      if (*crc == entry.crc) continue;
      add(problem(
          named, "records", named.record->offset + offset, entry.bytes,
          text("entry '", entry.name, "': CRC is ", base::crc_text(*crc), ", stored ", base::crc_text(entry.crc))));
    }
    return Status::ok();
  }

  /// Returns the CRC of a stretch of the file; nothing if the check was cancelled.
  base::Result<std::optional<uint32_t>> checksum(int64_t offset, int64_t bytes, io::File* file) {
    uint32_t crc = 0;
    for (int64_t done = 0; done < bytes;) {
      const int64_t size = std::min(kReadBytes, bytes - done);
      BCP_ASSIGN_OR_RETURN(const std::string piece, file->read(offset + done, size));
      crc = base::crc32(crc, piece.data(), piece.size());
      done += size;
      bytes_done_ += size;
      const bool tells = std::this_thread::get_id() == caller_;
      if (tells && !is_cancelled_ && !progress_(bytes_done_, bytes_total_)) is_cancelled_ = true;
      if (is_cancelled_) return std::optional<uint32_t>();
    }
    return std::make_optional(crc);
  }

  Problem problem(const NamedRecord& named, const char* section, int64_t offset, int64_t bytes,
                  std::string message) const {
    return {manifest_.files[named.record->file].name, section, offset, bytes, {named.item->fqn}, std::move(message)};
  }

  void add(Problem problem) {
    const base::MutexLock lock(mutex_);
    if (check_.problems.size() < kMaxProblems) check_.problems.push_back(std::move(problem));
  }

  const std::string& directory_;
  const format::Manifest& manifest_;
  const bool is_of_torch_;
  const std::function<bool(int64_t, int64_t)>& progress_;
  const std::thread::id caller_;
  std::vector<NamedRecord> records_;  // by file and offset, each extent once
  std::vector<Stretch> stretches_;    // of files of torch.save, which have no such records
  int64_t bytes_total_ = 0;
  std::atomic<size_t> next_{0};
  std::atomic<int64_t> bytes_done_{0};
  std::atomic<bool> is_cancelled_{false};
  base::Mutex mutex_;
  Status failure_ BCP_GUARDED_BY(mutex_);
  ForeignCheck check_ BCP_GUARDED_BY(mutex_);
};

}  // namespace

base::Result<ForeignCheck> check_foreign_records(const std::string& directory, const format::Manifest& manifest,
                                                 int num_threads,
                                                 const std::function<bool(int64_t, int64_t)>& progress) {
  return ForeignChecker(directory, manifest, progress).run(num_threads);
}

}  // namespace bytecheckpoint::engine
