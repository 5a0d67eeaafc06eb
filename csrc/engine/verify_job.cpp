// SPDX-License-Identifier: Apache-2.0
#include "csrc/engine/verify_job.h"

#include <algorithm>
#include <cerrno>

#include "csrc/base/crc32.h"
#include "csrc/engine/open_checkpoint.h"
#include "csrc/engine/source_file.h"
#include "csrc/format/compare_metadata.h"
#include "csrc/format/metadata_file.h"
#include "csrc/format/zip_record.h"
#include "csrc/io/directory.h"
#include "csrc/io/reader.h"
#include "csrc/staging/slot_ring.h"

namespace bytecheckpoint::engine {
namespace {

using base::Code;
using base::Status;
using base::text;

/// A record and whose it is, in the order of the file.
struct FileRecord {
  const format::Item* item;
  const format::Chunk* chunk;
  uint32_t data_crc = 0;  // of what has gone by
};

/// Verifies one checkpoint: the metadata of one commit mark and the files that it names.
class Verifier {
 public:
  Verifier(const VerifyOptions& options, const std::function<bool(int64_t, int64_t)>& progress, VerifyReport* report)
      : options_(options), progress_(progress), report_(report) {}

  Status verify(Scope scope) {
    BCP_ASSIGN_OR_RETURN(const std::optional<format::Manifest> readable, read_metadata(scope));
    if (!readable.has_value()) return Status::ok();
    const format::Manifest& manifest = *readable;
    report_->save_ids.push_back(base::to_hex(manifest.save_id));
    std::vector<std::vector<FileRecord>> records(manifest.files.size());
    for (const format::Item& item : manifest.items) {
      for (const format::Chunk& chunk : item.chunks) records[chunk.record.file].push_back({&item, &chunk});
    }
    for (const format::FileEntry& file : manifest.files) bytes_total_ += file.bytes;
    for (size_t f = 0; f < manifest.files.size(); ++f) {
      std::sort(records[f].begin(), records[f].end(), [](const FileRecord& a, const FileRecord& b) {
        return a.chunk->record.offset < b.chunk->record.offset;
      });
      BCP_RETURN_IF_ERROR(verify_file(manifest, manifest.files[f], &records[f]));
      report_->num_records += static_cast<int64_t>(records[f].size());
      ++report_->num_files;
    }
    if (report_->problems.empty()) return Status::ok();
    return look_for_a_newer_commit(scope, manifest.save_id);
  }

 private:
  bool is_full() const { return report_->problems.size() >= kMaxProblems; }

  void add(Problem problem) {
    if (!is_full()) report_->problems.push_back(std::move(problem));
  }

  /// Nothing for metadata that are damaged, which is then a problem.
  base::Result<std::optional<format::Manifest>> read_metadata(Scope scope) {
    BCP_ASSIGN_OR_RETURN(const std::string bytes, read_mark(options_.directory, scope));
    base::Result<format::Manifest> manifest = decode_mark(options_.directory, bytes, {scope, /*check_pickle=*/true});
    if (!manifest.is_ok()) {
      const Status fault = manifest.status();
      if (fault.code() != Code::kCorrupt && fault.code() != Code::kVersion) return fault;
      add({mark_name(scope), "metadata", fault.offset(), fault.num_bytes(), {}, fault.message()});
      return std::optional<format::Manifest>();
    }
    if (manifest.value().foreign.has_value()) {
      return Status::make(Code::kUnsupported,
                          text("verify(", options_.directory,
                               "): written by another tool; there is no checksum of ours to compare with"),
                          options_.directory);
    }
    BCP_ASSIGN_OR_RETURN(const std::string_view pickle, format::pickle_part(bytes));
    const std::string difference = format::compare_metadata(pickle, manifest.value());
    if (!difference.empty()) add({mark_name(scope), "metadata", -1, -1, {}, difference});
    return std::make_optional(std::move(manifest.value()));
  }

  Status verify_file(const format::Manifest& manifest, const format::FileEntry& entry,
                     std::vector<FileRecord>* records) {
    const auto opened = SourceFile::open(options_.directory, manifest, entry);
    if (!opened.is_ok()) {
      // Its trailer or table is not to be believed, so nothing can be said about its blocks.
      const Status fault = opened.status();
      if (fault.code() != Code::kCorrupt && fault.code() != Code::kVersion && fault.code() != Code::kStorage)
        return fault;
      add({entry.name,
           fault.sys_errno() == ENOENT ? "file" : "block table or trailer",
           fault.offset(),
           fault.num_bytes(),
           {},
           fault.message()});
      bytes_done_ += entry.bytes;
      return Status::ok();
    }
    const SourceFile& source = *opened.value();
    const size_t problems_before = report_->problems.size();
    BCP_ASSIGN_OR_RETURN(io::File file, source.reopen(options_.direct_io));
    BCP_RETURN_IF_ERROR(verify_blocks(source, entry, std::make_shared<io::File>(std::move(file)), records));
    bytes_done_ += entry.bytes - source.end_of_records;
    report_->bytes_checked += entry.bytes - source.end_of_records;
    if (report_->problems.size() != problems_before) return Status::ok();
    return verify_structure(source, entry, *records);
  }

  /// Every block against the table; on the way, the checksum of every tensor.
  Status verify_blocks(const SourceFile& source, const format::FileEntry& entry, std::shared_ptr<io::File> file,
                       std::vector<FileRecord>* records) {
    BCP_ASSIGN_OR_RETURN(const staging::BorrowedRing ring, staging::BorrowedRing::borrow(options_.ring_bytes));
    int64_t next = 0;
    const auto request = [&]() -> base::Result<std::optional<io::ReadRequest>> {
      if (next >= source.end_of_records) return std::optional<io::ReadRequest>();
      io::ReadRequest segment;
      segment.file = file;
      segment.offset = next;
      segment.wanted = std::min(staging::kSlotBytes, source.end_of_records - next);
      segment.size = base::align_up(segment.wanted, io::kDirectAlignment);
      next += segment.wanted;
      return std::optional<io::ReadRequest>(std::move(segment));
    };
    // One thread: the sums of tensors are carried on from segment to segment.
    io::Reader reader(1, ring->num_slots(), request, [&](int slot) { return ring->slot(slot); });
    size_t first = 0;
    while (const auto filled = reader.next()) {
      if (!filled->status.is_ok()) {
        add({entry.name, "records", -1, -1, {}, filled->status.message()});
        return Status::ok();
      }
      const io::ReadRequest& segment = filled->request;
      const uint8_t* bytes = ring->slot(filled->slot);
      for (int64_t block = 0; block < segment.wanted; block += format::kBlockBytes) {
        const int64_t size = std::min(format::kBlockBytes, segment.wanted - block);
        const Status sound = source.check_blocks(bytes + block, segment.offset + block, size);
        if (!sound.is_ok() && !is_full())
          add(block_problem(entry, segment.offset + block, size, *records, sound.message()));
      }
      const int64_t end = segment.offset + segment.wanted;
      while (first < records->size() && data_end((*records)[first]) <= segment.offset) ++first;
      for (size_t r = first; r < records->size() && (*records)[r].chunk->record.offset < end; ++r) {
        sum_data(segment, bytes, &(*records)[r]);
      }
      report_->bytes_checked += segment.wanted;
      bytes_done_ += segment.wanted;
      reader.release(filled->slot);
      if (!progress_(bytes_done_, bytes_total_)) {
        return Status::make(Code::kCancelled, text("verify(", options_.directory, "): interrupted"));
      }
    }
    return Status::ok();
  }

  static int64_t data_end(const FileRecord& record) { return record.chunk->record.offset + record.chunk->record.bytes; }

  static void sum_data(const io::ReadRequest& segment, const uint8_t* bytes, FileRecord* record) {
    const format::Record& place = record->chunk->record;
    const int64_t from = std::max(place.data_offset, segment.offset);
    const int64_t to = std::min(place.data_offset + place.data_bytes, segment.offset + segment.wanted);
    if (from >= to) return;
    record->data_crc = base::crc32(record->data_crc, bytes + (from - segment.offset), static_cast<size_t>(to - from));
  }

  static Problem block_problem(const format::FileEntry& entry, int64_t offset, int64_t size,
                               const std::vector<FileRecord>& records, std::string message) {
    Problem problem{entry.name, offset == 0 ? "header" : "records", offset, size, {}, std::move(message)};
    for (const FileRecord& record : records) {
      if (record.chunk->record.offset < offset + size && data_end(record) > offset) {
        problem.fqns.push_back(record.item->fqn);
      }
    }
    if (!problem.fqns.empty()) problem.section = "records";
    return problem;
  }

  /// The header, and what stands around the elements of each tensor: what stock readers go by.
  Status verify_structure(const SourceFile& source, const format::FileEntry& entry,
                          const std::vector<FileRecord>& records) {
    BCP_ASSIGN_OR_RETURN(io::File file, source.reopen(/*direct=*/false));
    BCP_ASSIGN_OR_RETURN(const std::string head, file.read(0, format::kHeaderBytes));
    const auto id = format::decode_header(head);
    if (!id.is_ok() || id.value().file_id != entry.id.file_id) {
      add({entry.name,
           "header",
           0,
           format::kHeaderBytes,
           {},
           id.is_ok() ? "header of another file" : id.status().message()});
    }
    for (const FileRecord& record : records) {
      const format::Record& place = record.chunk->record;
      if (place.offset + place.bytes > source.end_of_records) {
        add({entry.name,
             "records",
             place.offset,
             place.bytes,
             {record.item->fqn},
             text("the manifest has a record there, the records end at ", source.end_of_records)});
        continue;
      }
      if (place.kind != format::RecordKind::kTensor) continue;
      const auto zip = format::ZipRecord::layout(place.stored_dtype, record.chunk->box.sizes, place.offset);
      if (!zip.is_ok()) return zip.status();
      const int64_t data_end = place.data_offset + place.data_bytes;
      BCP_ASSIGN_OR_RETURN(const std::string before, file.read(place.offset, place.data_offset - place.offset));
      BCP_ASSIGN_OR_RETURN(const std::string after, file.read(data_end, place.offset + place.bytes - data_end));
      if (before != zip.value().head() || after != zip.value().tail(record.data_crc)) {
        add({entry.name,
             "records",
             place.offset,
             place.bytes,
             {record.item->fqn},
             text("the archive that stock readers read is not that of a ", tensor::find_dtype(place.stored_dtype)->name,
                  " tensor of ", tensor::to_text(record.chunk->box.sizes), " with these elements")});
      }
    }
    return Status::ok();
  }

  /// Problems are no problems of the checkpoint if it was replaced while it was read.
  Status look_for_a_newer_commit(Scope scope, const base::Id& save_id) const {
    const auto current = open_checkpoint(options_.directory, {scope});
    if (!current.is_ok() || current.value().save_id == save_id) return Status::ok();
    return Status::make(
        Code::kChanged,
        text("verify(", options_.directory, "): a newer commit replaced the checkpoint while it was read"),
        options_.directory);
  }

  const VerifyOptions& options_;
  const std::function<bool(int64_t, int64_t)>& progress_;
  VerifyReport* report_;
  int64_t bytes_done_ = 0;
  int64_t bytes_total_ = 0;
};

}  // namespace

base::Result<VerifyReport> verify_checkpoint(const VerifyOptions& options,
                                             const std::function<bool(int64_t, int64_t)>& progress) {
  VerifyReport report;
  std::vector<Scope> scopes;
  BCP_ASSIGN_OR_RETURN(const io::EntryType global,
                       io::entry_type(io::join(options.directory, std::string(kMetadataName))));
  if (global == io::EntryType::kAbsent) {
    const auto names = io::list_directory(options.directory);
    for (const std::string& name : names.is_ok() ? names.value() : std::vector<std::string>()) {
      uint32_t rank;
      if (is_rank_metadata_name(name, &rank)) scopes.push_back(rank);
    }
    std::sort(scopes.begin(), scopes.end());
  }
  if (scopes.empty()) scopes.push_back({});
  for (const Scope scope : scopes) BCP_RETURN_IF_ERROR(Verifier(options, progress, &report).verify(scope));
  return report;
}

}  // namespace bytecheckpoint::engine
