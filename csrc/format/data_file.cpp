// SPDX-License-Identifier: Apache-2.0
#include "csrc/format/data_file.h"

#include <cstring>

#include "csrc/base/crc32.h"

namespace bytecheckpoint::format {
namespace {

using base::Code;
using base::Status;
using base::text;

constexpr size_t kHeaderCrcPosition = 64;
constexpr size_t kTrailerCrcPosition = 48;
constexpr size_t kTrailerVersionPosition = 64;

bool read_number(std::string_view* name, char terminator) {
  size_t digits = 0;
  while (digits < name->size() && (*name)[digits] >= '0' && (*name)[digits] <= '9') ++digits;
  if (digits == 0 || digits > 10 || (digits > 1 && (*name)[0] == '0')) return false;
  if (digits >= name->size() || (*name)[digits] != terminator) return false;
  name->remove_prefix(digits + 1);
  return true;
}

}  // namespace

Status check_version(std::string_view where, uint32_t version, uint32_t newest) {
  if (version == 0) return Status::make(Code::kCorrupt, text(where, ": format version 0"));
  if (version <= newest) return Status::ok();
  return Status::make(Code::kVersion, text(where, ": format version ", version, ", this build reads up to ", newest));
}

std::string data_file_name(const DataFileId& id) {
  return text("__", id.rank, "_", id.number, ".", base::to_hex(id.file_id.data(), 8), ".distcp");
}

bool is_data_file_name(std::string_view name) {
  if (name.substr(0, 2) != "__") return false;
  name.remove_prefix(2);
  if (!read_number(&name, '_') || !read_number(&name, '.')) return false;
  if (name.size() != 16 + 7 || name.substr(16) != ".distcp") return false;
  return name.substr(0, 16).find_first_not_of("0123456789abcdef") == std::string_view::npos;
}

uint32_t crc_without_field(std::string_view bytes, size_t crc_position) {
  const uint32_t zero = 0;
  uint32_t crc = base::crc32(0, bytes.data(), crc_position);
  crc = base::crc32(crc, &zero, sizeof zero);
  return base::crc32(crc, bytes.data() + crc_position + 4, bytes.size() - crc_position - 4);
}

std::string encode_header(const DataFileId& id) {
  base::ByteWriter out;
  out.raw(kDataMagic);
  out.u32(kFormatVersion);
  out.u32(0);  // flags
  out.id(id.file_id);
  out.u32(id.rank);
  out.u32(id.number);
  out.zeros(static_cast<size_t>(kHeaderBytes) - out.size());
  out.put_u32(kHeaderCrcPosition, crc_without_field(out.bytes(), kHeaderCrcPosition));
  return out.take();
}

base::Result<DataFileId> decode_header(std::string_view bytes) {
  base::ByteReader in(bytes);
  const std::string_view magic = in.view(kDataMagic.size());
  const uint32_t version = in.u32();
  const uint32_t flags = in.u32();
  DataFileId id;
  id.file_id = in.id();
  id.rank = in.u32();
  id.number = in.u32();
  if (bytes.size() != static_cast<size_t>(kHeaderBytes) || magic != kDataMagic) {
    return Status::make(Code::kCorrupt, "header: not a data file of this format");
  }
  BCP_RETURN_IF_ERROR(check_version("header", version));
  uint32_t stored;
  std::memcpy(&stored, bytes.data() + kHeaderCrcPosition, sizeof stored);
  const uint32_t computed = crc_without_field(bytes, kHeaderCrcPosition);
  if (stored != computed || flags != 0) {
    return Status::make(Code::kCorrupt, text("header: CRC is ", computed, ", stored ", stored));
  }
  return id;
}

std::string encode_data_trailer(DataTrailer* trailer) {
  base::ByteWriter out;
  out.id(trailer->id.file_id);
  out.u32(trailer->id.rank);
  out.u32(trailer->id.number);
  out.i64(trailer->end_of_records);
  out.u32(static_cast<uint32_t>(kBlockBytes));
  out.u32(trailer->table_crc);
  out.i64(trailer->num_blocks);
  out.u32(0);  // CRC, below
  out.u32(0);  // flags
  out.u64(0);  // reserved
  out.u32(kFormatVersion);
  out.u32(static_cast<uint32_t>(kDataTrailerBytes));
  out.raw(kDataTrailerMagic);
  trailer->trailer_crc = crc_without_field(out.bytes(), kTrailerCrcPosition);
  out.put_u32(kTrailerCrcPosition, trailer->trailer_crc);
  return out.take();
}

base::Result<DataTrailer> decode_data_trailer(std::string_view bytes, int64_t file_bytes) {
  if (bytes.size() != static_cast<size_t>(kDataTrailerBytes) || bytes.substr(72) != kDataTrailerMagic) {
    return Status::make(Code::kCorrupt, text("trailer: missing at the end of ", file_bytes,
                                             " bytes (the file was cut, or is of another format)"));
  }
  base::ByteReader in(bytes);
  DataTrailer trailer;
  trailer.id.file_id = in.id();
  trailer.id.rank = in.u32();
  trailer.id.number = in.u32();
  trailer.end_of_records = in.i64();
  const uint32_t block_bytes = in.u32();
  trailer.table_crc = in.u32();
  trailer.num_blocks = in.i64();
  trailer.trailer_crc = in.u32();
  const uint32_t flags = in.u32();
  base::ByteReader tail(bytes.substr(kTrailerVersionPosition));
  const uint32_t version = tail.u32();
  BCP_RETURN_IF_ERROR(check_version("trailer", version));
  const uint32_t computed = crc_without_field(bytes, kTrailerCrcPosition);
  if (computed != trailer.trailer_crc || flags != 0) {
    return Status::make(Code::kCorrupt, text("trailer: CRC is ", computed, ", stored ", trailer.trailer_crc));
  }
  // The CRC is right, so the fields are those that a writer wrote. Wrong values are the fault of the writer, and are
  // refused.
  if (block_bytes != kBlockBytes || trailer.end_of_records < kHeaderBytes || trailer.end_of_records > file_bytes ||
      trailer.num_blocks != num_blocks_of(trailer.end_of_records) || trailer.file_bytes() != file_bytes) {
    return Status::make(Code::kCorrupt, text("trailer: end of records ", trailer.end_of_records, " and ",
                                             trailer.num_blocks, " blocks do not make a file of ", file_bytes));
  }
  return trailer;
}

std::string encode_block_table(const std::vector<uint32_t>& crcs) {
  return std::string(reinterpret_cast<const char*>(crcs.data()), 4 * crcs.size());
}

std::vector<uint32_t> decode_block_table(std::string_view bytes) {
  std::vector<uint32_t> crcs(bytes.size() / 4);
  if (!crcs.empty()) std::memcpy(crcs.data(), bytes.data(), 4 * crcs.size());
  return crcs;
}

}  // namespace bytecheckpoint::format
