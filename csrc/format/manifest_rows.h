// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <array>
#include <cstdint>
#include <string>
#include <string_view>

#include "csrc/base/bytes.h"
#include "csrc/base/status.h"
#include "csrc/format/manifest.h"

namespace bytecheckpoint::format {

/// Sections of a manifest in the order of the directory; on disk, never renumber.
enum Section : size_t {
  kStrings,
  kItems,
  kDims,
  kChunks,
  kFiles,
  kPlannerData,
  kUserMetadata,
  kCheckpointId,
  kNumSections
};

/// What a manifest begins with.
struct ManifestHead {
  struct Range {
    uint64_t offset = 0;  // from the start of the manifest
    uint64_t bytes = 0;
  };
  uint32_t version = 1;
  base::Id save_id{};
  std::array<Range, kNumSections> sections;
};

/// The last version of manifests; files and trailers around them have versions of their own.
inline constexpr uint32_t kManifestVersion = 2;
/// The first that knows items that are partial on purpose. Manifests without such items are of version 1.
inline constexpr uint32_t kPartialItemsVersion = 2;

inline constexpr size_t kManifestHeadBytes = 8 + 4 + 4 + 16 + 16 * kNumSections;

std::string encode_manifest_head(const ManifestHead& head);
/// \param bytes           The first kManifestHeadBytes of the manifest, or all of it.
/// \param manifest_bytes  All sections are inside.
/// \returns kCorrupt, kVersion.
base::Result<ManifestHead> decode_manifest_head(std::string_view bytes, uint64_t manifest_bytes);

/// Items, chunks and files as they stand in their sections, to the byte: all fields are aligned as in C, and bytes.h
/// asserts the byte order.
struct ItemRow {
  uint64_t name_offset;
  uint32_t name_bytes;
  uint8_t kind;  // kItemTensor or kItemBytes
  uint8_t dtype;
  uint8_t num_dims;
  uint8_t memory_format;
  uint8_t flags;
  uint8_t zero[3];
  uint32_t ordinal;
  uint64_t first_dim;
  uint64_t first_chunk;
  uint32_t num_chunks;
  uint32_t zero_end;
};

struct ChunkRow {
  uint64_t first_dim;
  uint32_t file;
  uint8_t kind;
  uint8_t stored_dtype;
  uint16_t zero;
  int64_t offset;
  int64_t bytes;
  int64_t data_offset;
  int64_t data_bytes;
};

struct FileRow {
  uint64_t name_offset;
  uint32_t name_bytes;
  uint32_t rank;
  uint32_t number;
  uint32_t trailer_crc;
  int64_t bytes;
  base::Id file_id;
};

inline constexpr size_t kRowBytes = 48;
static_assert(sizeof(ItemRow) == kRowBytes && sizeof(ChunkRow) == kRowBytes && sizeof(FileRow) == kRowBytes,
              "rows have no padding of the compiler's");

/// \param name_offset, first_dim, first_chunk  Where the other sections go on.
ItemRow pack_item(const Item& item, uint64_t name_offset, uint64_t first_dim, uint64_t first_chunk);
ChunkRow pack_chunk(const Chunk& chunk, uint64_t first_dim);
FileRow pack_file(const FileEntry& file, uint64_t name_offset);

// Below: what can be said of a row by itself. False, and why in `*fault`, if it is not what a manifest may have. What
// refers to other rows (names, dims, chunks) is the caller's to look up, and to check against its section.

/// Everything but chunks; `item` has its name and sizes.
/// \param version  Of the manifest.
bool unpack_item(const ItemRow& row, uint32_t version, Item* item, std::string* fault);
/// The record; `chunk` has its box, `item` all but chunks. `record.file` is in the list of files, and so `file_bytes`
/// known.
bool unpack_chunk(const ChunkRow& row, const Item& item, int64_t file_bytes, Chunk* chunk, std::string* fault);
/// All; `file` has its name.
bool unpack_file(const FileRow& row, FileEntry* file, std::string* fault);

}  // namespace bytecheckpoint::format
