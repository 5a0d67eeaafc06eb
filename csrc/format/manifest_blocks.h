// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <functional>
#include <string>
#include <string_view>
#include <vector>

#include "csrc/base/status.h"
#include "csrc/format/metadata_file.h"

namespace bytecheckpoint::format {

/// Reads `size` bytes of a file at `offset`: all, or a failure.
using ReadInto = std::function<base::Status(int64_t offset, int64_t size, char* into)>;

/// The manifest of one metadata file, of which only those blocks are read that somebody asks for.
///
/// Each is checked against the block table before it is used, the table against the trailer; the CRC of the whole
/// manifest is not looked at. The blocks used last are kept. Not thread-safe; a failure leaves it usable.
class ManifestBlocks {
 public:
  /// Reads trailer and table. \returns kNotFound without a trailer of ours; kCorrupt, kVersion; what `read` fails with.
  static base::Result<ManifestBlocks> open(int64_t file_bytes, ReadInto read);

  const MetadataTrailer& trailer() const { return trailer_; }
  uint64_t num_bytes() const { return static_cast<uint64_t>(trailer_.manifest_bytes); }
  /// Copies [offset, offset + size) of the manifest; kCorrupt if it is not all inside.
  base::Status copy(uint64_t offset, uint64_t size, void* into);

  /// How often a block was read, so far.
  int64_t num_blocks_read() const { return num_blocks_read_; }

 private:
  static constexpr size_t kMaxSlots = 64;  // 16 MiB

  struct Slot {
    int64_t block = -1;
    int64_t last_use = 0;
    std::string bytes;
  };

  ManifestBlocks() = default;
  /// Valid until the next call.
  base::Result<std::string_view> block(int64_t number);
  base::Status fill(int64_t number, Slot* slot);
  /// One that no block is in, the longest unused if need be.
  size_t free_slot();

  ReadInto read_;
  MetadataTrailer trailer_;
  std::vector<uint32_t> crcs_;
  std::vector<Slot> slots_;
  std::vector<int32_t> slot_of_block_;  // -1: in none
  int64_t num_uses_ = 0;
  int64_t num_blocks_read_ = 0;
};

}  // namespace bytecheckpoint::format
