// SPDX-License-Identifier: Apache-2.0
#include "csrc/engine/open/check_files.h"

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <iterator>

#include "csrc/base/named_thread.h"
#include "csrc/io/directory.h"
#include "csrc/io/file.h"

namespace bytecheckpoint::engine {
namespace {

using base::Code;
using base::Status;
using base::text;

constexpr size_t kMaxCheckThreads = 16;

Status check_file(const std::string& directory, const format::FileEntry& wanted) {
  const std::string path = io::join(directory, wanted.name);
  BCP_ASSIGN_OR_RETURN(io::File file, io::File::open(directory, wanted.name, /*direct=*/false));
  BCP_ASSIGN_OR_RETURN(const int64_t size, file.size());
  if (size != wanted.bytes) {
    return Status::make(Code::kCorrupt,
                        text("check(", path, "): the file must have ", wanted.bytes, " bytes, but has ", size), path,
                        size < wanted.bytes ? ENODATA : 0);
  }
  BCP_ASSIGN_OR_RETURN(const std::string bytes, file.read(size - format::kDataTrailerBytes, format::kDataTrailerBytes));
  base::Result<format::DataTrailer> trailer = format::decode_data_trailer(bytes, size);
  if (!trailer.is_ok()) return trailer.status().with_context(text("check(", path, ")"));
  if (trailer.value().trailer_crc != wanted.trailer_crc || trailer.value().id.file_id != wanted.id.file_id) {
    return Status::make(Code::kCorrupt,
                        text("check(", path, "): this is not the file that rank ", wanted.id.rank, " wrote"), path);
  }
  return Status::ok();
}

Status check_length(const std::string& directory, const std::string& name, int64_t at_least) {
  const std::string path = io::join(directory, name);
  BCP_ASSIGN_OR_RETURN(const io::File file, io::File::open(directory, name, /*direct=*/false));
  BCP_ASSIGN_OR_RETURN(const int64_t size, file.size());
  if (size >= at_least) return Status::ok();
  return Status::make(Code::kCorrupt,
                      text("check(", path, "): its records take ", at_least, " bytes, but the file has ", size), path);
}

/// Runs `check(0)` to `check(count - 1)` in several threads. \returns the first failure in this order.
template <class Check>
Status check_all(size_t count, const Check& check) {
  std::vector<Status> outcomes(count);
  std::atomic<size_t> next{0};
  const auto work = [&] {
    for (size_t i = next++; i < count; i = next++) outcomes[i] = check(i);
  };
  base::work_together("bcp-check", std::min(count, kMaxCheckThreads), work);
  for (Status& outcome : outcomes) {
    if (!outcome.is_ok()) return std::move(outcome);
  }
  return Status::ok();
}

}  // namespace

Status check_files(const std::string& directory, const std::vector<format::FileEntry>& files) {
  return check_all(files.size(), [&](size_t i) { return check_file(directory, files[i]); });
}

std::vector<int64_t> foreign_lengths(const format::Manifest& manifest) {
  std::vector<int64_t> lengths(manifest.files.size(), 0);
  for (const format::Item& item : manifest.items) {
    for (const format::Chunk& chunk : item.chunks) {
      if (chunk.record.kind == format::RecordKind::kAbsent) continue;  // in no file, and there may be none
      int64_t& length = lengths[chunk.record.file];
      // A record that ends beyond the largest number cannot be in a file: then no length is enough.
      const bool ends = chunk.record.offset <= INT64_MAX - chunk.record.bytes;
      length = ends ? std::max(length, chunk.record.offset + chunk.record.bytes) : INT64_MAX;
    }
  }
  return lengths;
}

Status check_foreign_files(const std::string& directory, const format::Manifest& manifest) {
  for (const format::Item& item : manifest.items) {
    for (const format::Chunk& chunk : item.chunks) {
      if (chunk.record.kind != format::RecordKind::kAbsent) continue;
      return Status::make(
          Code::kCorrupt,
          text("check(", directory, "): '", item.fqn, "': the metadata do not say where a chunk is stored"), directory);
    }
  }
  const std::vector<int64_t> lengths = foreign_lengths(manifest);
  return check_all(lengths.size(),
                   [&](size_t i) { return check_length(directory, manifest.files[i].name, lengths[i]); });
}

std::vector<format::FileEntry> files_here(const std::vector<format::FileEntry>& files, const RanksHere& ranks) {
  std::vector<format::FileEntry> here;
  std::copy_if(files.begin(), files.end(), std::back_inserter(here),
               [&](const format::FileEntry& file) { return !ranks.has_value() || ranks->count(file.id.rank) != 0; });
  return here;
}

}  // namespace bytecheckpoint::engine
