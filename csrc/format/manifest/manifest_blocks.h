// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <functional>
#include <string>
#include <string_view>
#include <vector>

#include "csrc/base/status.h"
#include "csrc/format/manifest/metadata_file.h"

namespace bytecheckpoint::format {

/// Reads `size` bytes at `offset` of a file: all of them, or a failure.
using ReadInto = std::function<base::Status(int64_t offset, int64_t size, char* into)>;

/// The manifest of one metadata file, of which only those blocks are read that somebody needs.
///
/// Each block is checked against the block table before it is used, and the table against the trailer. The CRC of the
/// whole manifest is not checked. The 64 blocks that were used last (16 MiB) are kept in memory.
/// Not thread-safe. After a failure the object can still be used.
class ManifestBlocks {
 public:
  /// Reads trailer and block table.
  /// \param file_bytes  Size of the metadata file.
  /// \returns kNotFound if the file has no trailer of ours; kCorrupt, kVersion; what `read` fails with.
  static base::Result<ManifestBlocks> open(int64_t file_bytes, ReadInto read);

  const MetadataTrailer& trailer() const { return trailer_; }
  uint64_t num_bytes() const { return static_cast<uint64_t>(trailer_.manifest_bytes); }
  /// Copies the bytes [offset, offset + size) of the manifest. \returns kCorrupt if they do not all lie in it, or if a
  /// block fails its CRC.
  base::Status copy(uint64_t offset, uint64_t size, void* into);
  /// Reads and checks all blocks, and keeps none of them. \returns kCorrupt if one fails its CRC.
  base::Status check_all();

  /// Returns how many blocks were read so far; a block that was read twice counts twice.
  int64_t num_blocks_read() const { return num_blocks_read_; }

 private:
  static constexpr size_t kMaxSlots = 64;  // 16 MiB

  struct Slot {
    int64_t block = -1;
    int64_t last_use = 0;
    std::string bytes;
  };

  ManifestBlocks() = default;
  /// Returns the bytes of a block, valid until the next call.
  base::Result<std::string_view> block(int64_t number);
  base::Status fill(int64_t number, Slot* slot);
  /// Returns the number of a slot that holds no block. Evicts the block that was not used for the longest time if need
  /// be.
  size_t free_slot();

  ReadInto read_;
  MetadataTrailer trailer_;
  std::vector<uint32_t> crcs_;
  std::vector<Slot> slots_;
  std::vector<int32_t> slot_of_block_;  // -1 if the block is in no slot
  int64_t num_uses_ = 0;
  int64_t num_blocks_read_ = 0;
};

}  // namespace bytecheckpoint::format
