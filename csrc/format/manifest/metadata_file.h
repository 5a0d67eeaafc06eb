// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "csrc/base/bytes.h"
#include "csrc/base/status.h"
#include "csrc/format/manifest/manifest.h"

namespace bytecheckpoint::format {

/// The file `.metadata` has no gaps between its parts; FORMAT.md defines the fields. Stock readers unpickle its begin
/// and ignore the rest. Our loads read the manifest and never the pickle:
///
///     | pickle of DCP's Metadata | manifest | block table | trailer 128 |
inline constexpr int64_t kMetadataTrailerBytes = 128;
inline constexpr std::string_view kMetadataMagic{"BCPMETA\1", 8};
/// Our save ids in DCP's StorageMeta begin with this; 32 hex digits follow.
inline constexpr std::string_view kSaveIdPrefix = "bcp1-";

/// The trailer of `.metadata`, decoded. `num_blocks` counts the blocks of 256 KiB of the manifest.
struct MetadataTrailer {
  base::Id save_id{};
  int64_t pickle_bytes = 0;
  int64_t manifest_bytes = 0;
  int64_t num_blocks = 0;
  uint32_t pickle_crc = 0;
  uint32_t manifest_crc = 0;
  uint32_t table_crc = 0;

  int64_t table_offset() const { return pickle_bytes + manifest_bytes; }
  int64_t file_bytes() const { return table_offset() + 4 * num_blocks + kMetadataTrailerBytes; }
};

/// Returns the whole file `.metadata` for a manifest, whose items must be sorted and unique.
std::string encode_metadata_file(const Manifest& manifest);

/// Decodes and checks a trailer.
/// \param bytes  The last kMetadataTrailerBytes of the file.
/// \param file_bytes  Size of the file; the parts that the trailer describes must add up to it.
/// \returns kNotFound if there is no trailer of ours at all; kCorrupt for damage, kVersion for a newer version.
base::Result<MetadataTrailer> decode_metadata_trailer(std::string_view bytes, int64_t file_bytes);

/// Checks the block table of the manifest. \returns kCorrupt if it is not the one for which the trailer was written.
base::Status check_table(const MetadataTrailer& trailer, std::string_view table);
/// Makes the failure for block `number` of the manifest, whose computed CRC differs from the stored one.
base::Status wrong_block(const MetadataTrailer& trailer, int64_t number, uint32_t computed, uint32_t stored);

/// Checks block table and manifest of a whole file against its trailer, and decodes the manifest. Does not check the
/// pickle. \returns kNotFound, kCorrupt, kVersion as `decode_metadata_trailer` does.
base::Result<Manifest> decode_metadata_file(std::string_view bytes);

/// Returns the pickle in a whole file, unchecked. \returns kNotFound, kCorrupt, kVersion as `decode_metadata_trailer`
/// does.
base::Result<std::string_view> pickle_part(std::string_view file_bytes);

/// Checks the CRC of the pickle in a whole file. None of our readers uses the pickle, but every stock reader does.
base::Status check_pickle(std::string_view file_bytes);

/// Returns the pickle that stock DCP reads. Unpickled, it equals what DCP itself writes for the same state.
/// \param spare_bytes  Capacity to reserve behind the pickle, for what the caller appends.
/// \param id_prefix    What the save id begins with; another one than ours for a checkpoint that is stock DCP's alone.
std::string metadata_pickle(const Manifest& manifest, size_t spare_bytes = 0,
                            std::string_view id_prefix = kSaveIdPrefix);

}  // namespace bytecheckpoint::format
