// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <array>
#include <cstdint>
#include <string>
#include <string_view>

#include "csrc/base/bytes.h"
#include "csrc/base/status.h"
#include "csrc/format/manifest/manifest.h"

namespace bytecheckpoint::format {

/// Sections of a manifest, in the order of the directory. The order is on disk: never change it.
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

/// The head of a manifest: version, save id, and the directory of its sections.
struct ManifestHead {
  struct Range {
    uint64_t offset = 0;  // from the start of the manifest
    uint64_t bytes = 0;
  };
  uint32_t version = 1;
  base::Id save_id{};
  std::array<Range, kNumSections> sections;
};

/// The newest version of manifests. Data files and trailers have version numbers of their own.
inline constexpr uint32_t kManifestVersion = 2;
/// The first version that knows items that are partial on purpose. A manifest without such items is written as version
/// 1.
inline constexpr uint32_t kPartialItemsVersion = 2;

inline constexpr size_t kManifestHeadBytes = 8 + 4 + 4 + 16 + 16 * kNumSections;

/// Returns the kManifestHeadBytes of a head.
std::string encode_manifest_head(const ManifestHead& head);
/// Decodes and checks a head.
/// \param bytes  The first kManifestHeadBytes of the manifest, or all of it.
/// \param manifest_bytes  Length of the manifest; all sections must lie in it.
/// \returns kCorrupt for damage, kVersion for a newer version.
base::Result<ManifestHead> decode_manifest_head(std::string_view bytes, uint64_t manifest_bytes);

/// Items, chunks and files exactly as they stand in their sections. All fields are aligned as in C, and bytes.h asserts
/// the byte order, so a row is copied as it is. `first_dim` is an index into the dims section, `first_chunk` into the
/// chunks section; name offsets count in the strings section.
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

/// Make the row of an item, a chunk or a file.
/// \param name_offset  Offset of its name in the strings section.
/// \param first_dim  Index of its first number in the dims section.
/// \param first_chunk  Index of its first chunk in the chunks section.
ItemRow pack_item(const Item& item, uint64_t name_offset, uint64_t first_dim, uint64_t first_chunk);
ChunkRow pack_chunk(const Chunk& chunk, uint64_t first_dim);
FileRow pack_file(const FileEntry& file, uint64_t name_offset);

// The functions below check all that a single row can tell. They return false, and say why in `*fault`, if the row is
// not valid in a manifest. Names, dims and chunks, to which a row refers, are for the caller to look up and to check
// against their sections.

/// Fills in all of an item but its chunks. `item` must have its name and sizes already.
/// \param version  Of the manifest.
bool unpack_item(const ItemRow& row, uint32_t version, Item* item, std::string* fault);
/// Fills in the record of a chunk. `chunk` must have its box, and `item` all but its chunks.
/// \param file_bytes  Size of the file `row.file`, which the caller has found in the list of files.
bool unpack_chunk(const ChunkRow& row, const Item& item, int64_t file_bytes, Chunk* chunk, std::string* fault);
/// Fills in all of a file but its name, which `file` must have already.
bool unpack_file(const FileRow& row, FileEntry* file, std::string* fault);

}  // namespace bytecheckpoint::format
