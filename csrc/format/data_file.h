// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "csrc/base/bytes.h"
#include "csrc/base/status.h"

namespace bytecheckpoint::format {

/// `[header][records][block table][trailer]`, nothing between them; FORMAT.md has the fields.
inline constexpr uint32_t kFormatVersion = 1;
inline constexpr int64_t kHeaderBytes = 4096;
inline constexpr int64_t kBlockBytes = 256 << 10;
inline constexpr int64_t kDataTrailerBytes = 80;
inline constexpr std::string_view kDataMagic{"BCPDATA\1", 8};
inline constexpr std::string_view kDataTrailerMagic{"BCPTAIL\1", 8};

/// Refuses a version that this code does not know, before anything else of a structure is believed.
/// \param where   What was read, for the message.
/// \param newest  Version of such a structure that is known.
base::Status check_version(std::string_view where, uint32_t version, uint32_t newest = kFormatVersion);

/// What names one data file of one save.
struct DataFileId {
  base::Id file_id{};
  uint32_t rank = 0;
  uint32_t number = 0;  // counts the files of a rank
};

/// `__{rank}_{number}.{first 16 hex digits of the file id}.distcp`
std::string data_file_name(const DataFileId& id);
/// Is `name` one that `data_file_name` makes? Only such files are ever swept.
bool is_data_file_name(std::string_view name);

struct DataTrailer {
  DataFileId id;
  int64_t end_of_records = 0;  // bytes from the start of the file
  int64_t num_blocks = 0;
  uint32_t table_crc = 0;
  uint32_t trailer_crc = 0;  // set by encode and decode

  int64_t table_bytes() const { return 4 * num_blocks; }
  int64_t file_bytes() const { return end_of_records + table_bytes() + kDataTrailerBytes; }
};

std::string encode_header(const DataFileId& id);
/// kCorrupt, kVersion.
base::Result<DataFileId> decode_header(std::string_view bytes);

/// Sets `trailer->trailer_crc`.
std::string encode_data_trailer(DataTrailer* trailer);
/// \param bytes      The last kDataTrailerBytes of the file.
/// \param file_bytes Size of the file; what the trailer describes must add up to it.
base::Result<DataTrailer> decode_data_trailer(std::string_view bytes, int64_t file_bytes);

/// Blocks that cover [0, bytes).
inline int64_t num_blocks_of(int64_t bytes) {
  return (bytes + kBlockBytes - 1) / kBlockBytes;
}

/// CRCs as they stand on disk, and back.
std::string encode_block_table(const std::vector<uint32_t>& crcs);
std::vector<uint32_t> decode_block_table(std::string_view bytes);

/// CRC over `bytes` with the four bytes at `crc_position` taken as zero. The field is neither first nor last in what
/// it covers: a CRC right behind its data makes the CRC of the whole a constant.
uint32_t crc_without_field(std::string_view bytes, size_t crc_position);

}  // namespace bytecheckpoint::format
