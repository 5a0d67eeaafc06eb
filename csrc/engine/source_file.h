// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "csrc/base/status.h"
#include "csrc/format/manifest.h"
#include "csrc/io/file.h"

namespace bytecheckpoint::engine {

/// What must be known of a data file before a byte of it is believed.
struct SourceFile {
  std::string directory;
  std::string name;
  std::string path;  // of both
  int64_t end_of_records = 0;
  bool has_checksums = false;  // one of ours; a foreign file has none
  std::vector<uint32_t> block_crcs;

  /// Looks at the file of `entry`. One of ours is compared with the manifest, so that a stale, swapped or foreign file
  /// is seen before its data. In a foreign checkpoint a file of ours answers for itself, any other is only measured.
  /// \returns kCorrupt, kVersion, kStorage.
  static base::Result<std::shared_ptr<const SourceFile>> open(const std::string& directory,
                                                              const format::Manifest& manifest,
                                                              const format::FileEntry& entry);

  /// To read from it.
  base::Result<io::File> reopen(bool direct) const { return io::File::open(directory, name, direct); }
  /// CRC of whole blocks. \param offset  Of the first byte, a multiple of the block size.
  base::Status check_blocks(const uint8_t* bytes, int64_t offset, int64_t size) const;
  /// The failure of a record that the metadata wants beyond the end.
  base::Status behind_the_records(int64_t offset) const;
};

}  // namespace bytecheckpoint::engine
