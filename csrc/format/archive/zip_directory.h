// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <optional>
#include <string_view>
#include <vector>

#include "csrc/base/status.h"
#include "csrc/format/archive/archive_reader.h"

namespace bytecheckpoint::format {

/// One entry of an archive, as the central directory describes it.
struct ZipEntry {
  std::string_view name;  // any bytes, not always UTF-8
  bool is_plain = false;  // neither compressed nor encrypted: the bytes in the archive are the content
  uint32_t crc = 0;
  int64_t bytes = 0;          // length of the content
  int64_t header_offset = 0;  // of the local header, in the archive
};

/// The central directory of a zip archive. Its views point into memory of the ArchiveReader.
struct ZipDirectory {
  std::vector<ZipEntry> entries;
  int64_t begin = 0;  // where the directory starts: the content of every entry lies before it

  /// Finds the entry `folder/name`. \returns nullptr if there is none; kCorrupt if there are two.
  base::Result<const ZipEntry*> find(std::string_view folder, std::string_view name) const;
};

/// Largest directory that is read. That of one tensor takes less than 1 KiB.
inline constexpr int64_t kMaxDirectoryBytes = 64 << 10;

/// Reads the central directory.
///
/// \returns nullopt for a directory larger than `max_bytes`, which is not read; kUnsupported for what is no zip
/// archive; kCorrupt for a damaged one.
base::Result<std::optional<ZipDirectory>> read_zip_directory(ArchiveReader* archive,
                                                             int64_t max_bytes = kMaxDirectoryBytes);

/// Compares what the directory says of an entry with its local header: the name, and whether it is plain. The directory
/// itself has no checksum. \returns kCorrupt if they differ.
base::Status check_header(const ZipEntry& entry, ArchiveReader* archive);

/// Returns where the content of a plain entry starts: behind its local header, whose name and padding may have another
/// length than in the directory. \returns kCorrupt if the content does not lie between header and directory.
base::Result<int64_t> content_offset(const ZipEntry& entry, const ZipDirectory& directory, ArchiveReader* archive);
/// The same, if the local header was read already. \param header  Its first zip::kLocalHeaderBytes bytes.
base::Result<int64_t> content_offset(const ZipEntry& entry, const ZipDirectory& directory, std::string_view header);

}  // namespace bytecheckpoint::format
