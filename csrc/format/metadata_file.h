// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "csrc/base/bytes.h"
#include "csrc/base/status.h"
#include "csrc/format/manifest.h"

namespace bytecheckpoint::format {

/// `.metadata`: `[pickle of DCP's Metadata][manifest][block table of the manifest][trailer]`.
inline constexpr int64_t kMetadataTrailerBytes = 128;
inline constexpr std::string_view kMetadataMagic{"BCPMETA\1", 8};
/// What our save ids look like in DCP's StorageMeta: this and 32 hex digits.
inline constexpr std::string_view kSaveIdPrefix = "bcp1-";

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

/// The whole file for `manifest`.
std::string encode_metadata_file(const Manifest& manifest);

/// \param bytes       The last kMetadataTrailerBytes of the file.
/// \param file_bytes  Its size.
/// \returns kNotFound if there is no trailer of ours at all; kCorrupt, kVersion.
base::Result<MetadataTrailer> decode_metadata_trailer(std::string_view bytes, int64_t file_bytes);

/// kCorrupt if `table` is not the one that the trailer was written with.
base::Status check_table(const MetadataTrailer& trailer, std::string_view table);
/// The failure of block `number` of the manifest, whose CRC is not the stored one.
base::Status wrong_block(const MetadataTrailer& trailer, int64_t number, uint32_t computed, uint32_t stored);

/// Checks table and manifest against the trailer and decodes the manifest. `bytes` is the whole file.
base::Result<Manifest> decode_metadata_file(std::string_view bytes);

/// The pickle part of a whole file; kCorrupt, kVersion, kNotFound as above.
base::Result<std::string_view> pickle_part(std::string_view file_bytes);

/// CRC of the pickle part, which no reader of ours uses but every stock reader does.
base::Status check_pickle(std::string_view file_bytes);

/// The pickle part: what stock DCP unpickles. Equal, once unpickled, to what DCP writes for the same state.
/// \param spare_bytes  Capacity to have behind it, for what the caller appends.
std::string metadata_pickle(const Manifest& manifest, size_t spare_bytes = 0);

}  // namespace bytecheckpoint::format
