// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <optional>
#include <string_view>
#include <vector>

#include "csrc/base/status.h"
#include "csrc/format/archive_reader.h"

namespace bytecheckpoint::format {

/// One entry, as the central directory describes it.
struct ZipEntry {
  std::string_view name;  // any bytes
  bool is_plain = false;  // stored, not encrypted: the bytes in the archive are the content
  uint32_t crc = 0;
  int64_t bytes = 0;  // of the content
  int64_t header_offset = 0;
};

/// What a zip archive says it contains. Views point into the reader's pieces.
struct ZipDirectory {
  std::vector<ZipEntry> entries;
  int64_t begin = 0;  // where the directory starts: the content of every entry lies before it

  /// nullptr if there is none; kCorrupt if there are two.
  base::Result<const ZipEntry*> find(std::string_view folder, std::string_view name) const;
};

/// Largest directory that is read; one tensor needs less than 1 KiB.
inline constexpr int64_t kMaxDirectoryBytes = 64 << 10;

/// \returns kUnsupported for what is no zip archive; kCorrupt for a damaged one; nullopt for a directory larger than
///   kMaxDirectoryBytes, of which nothing was read.
base::Result<std::optional<ZipDirectory>> read_zip_directory(ArchiveReader* archive);

/// Where the content of a plain entry starts: behind its local header, whose names and padding are its own.
/// kCorrupt if the content does not lie between header and directory.
base::Result<int64_t> content_offset(const ZipEntry& entry, const ZipDirectory& directory, ArchiveReader* archive);

}  // namespace bytecheckpoint::format
