// SPDX-License-Identifier: Apache-2.0
#include "csrc/engine/copy/copy_files.h"

#include <algorithm>
#include <memory>
#include <optional>
#include <utility>
#include <vector>

#include "csrc/engine/check/file_check.h"
#include "csrc/engine/open/source_file.h"
#include "csrc/io/directory.h"
#include "csrc/io/file.h"
#include "csrc/io/object_store.h"
#include "csrc/io/reader.h"
#include "csrc/io/writer.h"

namespace bytecheckpoint::engine {
namespace {

using base::Code;
using base::Status;
using base::text;

class FileCopier {
 public:
  FileCopier(const CopyFilesOptions& options, const format::Manifest& manifest, staging::SlotRing* ring,
             const std::function<bool(int64_t, int64_t)>& progress)
      : options_(options), manifest_(manifest), ring_(ring), progress_(progress) {
    for (const format::FileEntry& file : manifest.files) total_ += file.bytes;
  }

  int64_t total() const { return total_; }

  Status copy(const format::FileEntry& entry, std::vector<FileCheck::Record> records) {
    FileCheck check(entry, std::move(records));
    BCP_RETURN_IF_ERROR(check.open(options_.source, manifest_, options_.direct_io));
    if (check.file() == nullptr) return damage(&check);
    BCP_ASSIGN_OR_RETURN(io::File target, io::File::create(io::join(options_.target, entry.name), options_.direct_io));
    BCP_RETURN_IF_ERROR(target.reserve(entry.bytes));
    BCP_RETURN_IF_ERROR(stream(entry, &check, &target));
    Status found = damage(&check);
    if (!found.is_ok()) return found;
    BCP_RETURN_IF_ERROR(target.truncate(entry.bytes));
    BCP_RETURN_IF_ERROR(target.sync());
    BCP_RETURN_IF_ERROR(target.close());
    return SourceFile::open(options_.target, manifest_, entry).status();
  }

 private:
  Status stream(const format::FileEntry& entry, FileCheck* check, io::File* target) {
    int64_t offset = 0;
    const auto next = [&]() -> base::Result<std::optional<io::ReadRequest>> {
      if (offset >= entry.bytes) return std::optional<io::ReadRequest>();
      io::ReadRequest segment;
      segment.file = check->file();
      segment.offset = offset;
      segment.wanted = std::min(staging::kSlotBytes, entry.bytes - offset);
      segment.size = base::align_up(segment.wanted, io::kDirectAlignment);
      offset += segment.wanted;
      return std::optional<io::ReadRequest>(std::move(segment));
    };
    const auto num_threads =
        static_cast<int>(std::clamp<int64_t>(entry.bytes / staging::kSlotBytes + 1, 1, options_.num_threads));
    // The writer ends before the reader, to which it gives slots back.
    io::Reader reader(
        num_threads, ring_->num_slots(), next, [this](int slot) { return ring_->slot(slot); }, options_.io_timeout_s,
        options_.source);
    io::WriterOptions writing{num_threads, static_cast<size_t>(ring_->num_slots()), options_.niceness,
                              options_.bytes_per_s, options_.io_timeout_s};
    io::Writer writer(writing, [&](int slot) { reader.release(slot); });
    Status outcome;
    while (outcome.is_ok()) {
      auto filled = reader.next();
      if (!filled.has_value()) break;
      outcome = filled->status.is_ok() ? writer.status() : std::move(filled->status);
      if (!outcome.is_ok()) break;
      const io::ReadRequest& segment = filled->request;
      const uint8_t* const bytes = ring_->slot(filled->slot);
      const int64_t of_records = std::min(segment.wanted, check->end_of_records() - segment.offset);
      if (of_records > 0) check->look_at(segment.offset, of_records, bytes);
      const std::string_view piece(reinterpret_cast<const char*>(bytes), static_cast<size_t>(segment.wanted));
      done_ += segment.wanted;
      writer.submit({target, {piece}, segment.wanted, segment.offset, filled->slot});
      if (!progress_(done_, total_)) {
        outcome = Status::make(Code::kCancelled, text("copy(", options_.target, "): interrupted"));
      }
    }
    if (!outcome.is_ok()) writer.cancel();
    const Status written = writer.finish();
    return outcome.is_ok() ? written : outcome;
  }

  /// Returns the first fault that was found.
  Status damage(FileCheck* check) const {
    const std::vector<Problem> problems = check->take_problems();
    if (problems.empty()) return Status::ok();
    const Problem& first = problems.front();
    return Status::make(Code::kCorrupt, text(first.section, ": ", first.message))
        .at(first.offset, first.bytes)
        .in_file(io::join(options_.source, first.file));
  }

  const CopyFilesOptions& options_;
  const format::Manifest& manifest_;
  staging::SlotRing* const ring_;
  const std::function<bool(int64_t, int64_t)>& progress_;
  int64_t total_ = 0;
  int64_t done_ = 0;
};

}  // namespace

base::Result<int64_t> copy_files(const CopyFilesOptions& options, const format::Manifest& manifest,
                                 const std::function<bool(int64_t, int64_t)>& progress) {
  if (manifest.foreign.has_value()) {
    return Status::make(Code::kUnsupported, text("copy(", options.source, "): another writer made it"));
  }
  std::vector<std::vector<FileCheck::Record>> records(manifest.files.size());
  for (const format::Item& item : manifest.items) {
    for (const format::Chunk& chunk : item.chunks) records[chunk.record.file].push_back({&item, &chunk});
  }
  BCP_ASSIGN_OR_RETURN(const staging::BorrowedRing ring, staging::BorrowedRing::borrow(options.ring_bytes));
  FileCopier copier(options, manifest, &*ring, progress);
  for (size_t f = 0; f < manifest.files.size(); ++f) {
    BCP_RETURN_IF_ERROR(copier.copy(manifest.files[f], std::move(records[f])));
  }
  if (!io::is_url(options.target) && !manifest.files.empty()) {
    BCP_RETURN_IF_ERROR(io::sync_directory(options.target));
  }
  return copier.total();
}

}  // namespace bytecheckpoint::engine
