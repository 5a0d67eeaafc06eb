// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "csrc/base/status.h"
#include "csrc/format/manifest/manifest.h"
#include "csrc/io/file.h"

namespace bytecheckpoint::engine {

/// What must be known about a data file before its bytes are used. Immutable once opened, so any thread may use it.
struct SourceFile {
  std::string directory;
  format::FileEntry entry;  // as it must be
  std::string path;         // `directory/name`
  int64_t end_of_records = 0;
  bool has_checksums = false;  // true for a file of ours; another writer's has none
  std::vector<uint32_t> block_crcs;

  /// Opens and checks the file of `entry`. A file of our checkpoint is compared with the manifest, so that a stale or
  /// swapped file is noticed before its data are used. In another writer's checkpoint, a file that begins and ends like
  /// ours is checked by its own trailer, and of any other file only the length is read.
  /// \returns kCorrupt, kVersion, kStorage; kChanged as `open_planned`.
  static base::Result<std::shared_ptr<const SourceFile>> open(const std::string& directory,
                                                              const format::Manifest& manifest,
                                                              const format::FileEntry& entry);

  /// Reads what a data file of ours says of itself, if no manifest names it. It cannot be opened again.
  /// \returns kCorrupt, also for any other file. kVersion. kStorage.
  static base::Result<std::shared_ptr<const SourceFile>> of_one_file(io::File* file);

  /// Opens the file again, for reading. \returns kChanged for another version of another writer's file. kStorage.
  base::Result<io::File> reopen(bool direct) const;
  /// Compares whole blocks with their CRCs. \param offset  Of the first byte; a multiple of the block size. \returns
  /// kCorrupt.
  base::Status check_blocks(const uint8_t* bytes, int64_t offset, int64_t size) const;
  /// Returns the error for a record that the metadata expects behind the end of the records.
  base::Status behind_the_records(int64_t offset) const;
};

}  // namespace bytecheckpoint::engine
