// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "csrc/base/bytes.h"
#include "csrc/base/status.h"

namespace bytecheckpoint::format {

/// A data file has no gaps between its parts; FORMAT.md defines the fields. The block table has one CRC for each 256
/// KiB of what stands before it, wherever records begin and end:
///
///     0        4096                                       end_of_records    file_bytes
///     | header | record | record |   ...   |    record    | block table | trailer 80 |
///     |    block 0    |    block 1    | ...  | last block |
inline constexpr uint32_t kFormatVersion = 1;
inline constexpr int64_t kHeaderBytes = 4096;
inline constexpr int64_t kBlockBytes = 256 << 10;
inline constexpr int64_t kDataTrailerBytes = 80;
inline constexpr std::string_view kDataMagic{"BCPDATA\1", 8};
inline constexpr std::string_view kDataTrailerMagic{"BCPTAIL\1", 8};

/// Refuses a version that this code does not know. Callers check it before they trust anything else of a structure.
/// \param where  Names the structure in the message.
/// \param newest  The newest version of this structure that this code knows.
/// \returns kVersion for a newer version, kCorrupt for version 0.
base::Status check_version(std::string_view where, uint32_t version, uint32_t newest = kFormatVersion);

/// Identifies one data file of one save.
struct DataFileId {
  base::Id file_id{};
  uint32_t rank = 0;
  uint32_t number = 0;  // 0, 1, ... for the files of a rank
};

/// Returns `__{rank}_{number}.{first 16 hex digits of the file id}.distcp`.
std::string data_file_name(const DataFileId& id);
/// Returns whether `name` is one that `data_file_name` can make. A sweep removes only files with such names.
bool is_data_file_name(std::string_view name);

/// The trailer of a data file, decoded.
struct DataTrailer {
  DataFileId id;
  int64_t end_of_records = 0;  // bytes from the start of the file
  int64_t num_blocks = 0;
  uint32_t table_crc = 0;
  uint32_t trailer_crc = 0;  // set by encode_data_trailer and decode_data_trailer

  int64_t table_bytes() const { return 4 * num_blocks; }
  int64_t file_bytes() const { return end_of_records + table_bytes() + kDataTrailerBytes; }
};

/// Returns the kHeaderBytes of a header, CRC included.
std::string encode_header(const DataFileId& id);
/// Decodes and checks a header. \returns kCorrupt for damage, kVersion for a newer version.
base::Result<DataFileId> decode_header(std::string_view bytes);

/// Returns the kDataTrailerBytes of a trailer, and sets `trailer->trailer_crc`.
std::string encode_data_trailer(DataTrailer* trailer);
/// Decodes and checks a trailer.
/// \param bytes  The last kDataTrailerBytes of the file.
/// \param file_bytes  Size of the file; the parts that the trailer describes must add up to it.
/// \returns kCorrupt for damage, or if there is no trailer of ours; kVersion for a newer version.
base::Result<DataTrailer> decode_data_trailer(std::string_view bytes, int64_t file_bytes);

/// Returns the number of blocks that cover [0, bytes). The last one may be shorter than the others.
inline int64_t num_blocks_of(int64_t bytes) {
  return (bytes + kBlockBytes - 1) / kBlockBytes;
}

/// Encode the CRCs of blocks as they stand on disk, and decode them. Decoding checks nothing.
std::string encode_block_table(const std::vector<uint32_t>& crcs);
std::vector<uint32_t> decode_block_table(std::string_view bytes);

/// Returns the CRC of `bytes` with the four bytes at `crc_position` taken as zero. The field must not be first or last
/// in `bytes`: if a CRC stands right behind the data that it covers, the CRC of both together is a constant.
uint32_t crc_without_field(std::string_view bytes, size_t crc_position);

}  // namespace bytecheckpoint::format
