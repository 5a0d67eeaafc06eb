// SPDX-License-Identifier: Apache-2.0
#include "csrc/format/metadata_file.h"

#include <algorithm>
#include <cstring>

#include "csrc/base/crc32.h"

namespace bytecheckpoint::format {
namespace {

using base::Code;
using base::Status;
using base::text;

constexpr size_t kCrcPosition = 56;
constexpr size_t kVersionPosition = 112;

std::vector<uint32_t> block_crcs(std::string_view bytes) {
  std::vector<uint32_t> crcs;
  for (size_t begin = 0; begin < bytes.size(); begin += kBlockBytes) {
    const std::string_view block = bytes.substr(begin, kBlockBytes);
    crcs.push_back(base::crc32(0, block.data(), block.size()));
  }
  return crcs;
}

std::string encode_trailer(const MetadataTrailer& trailer) {
  base::ByteWriter out;
  out.id(trailer.save_id);
  out.i64(trailer.pickle_bytes);
  out.i64(trailer.manifest_bytes);
  out.i64(trailer.num_blocks);
  out.u32(static_cast<uint32_t>(kBlockBytes));
  out.u32(trailer.pickle_crc);
  out.u32(trailer.manifest_crc);
  out.u32(trailer.table_crc);
  out.u32(0);  // CRC, below
  out.u32(0);  // flags
  out.zeros(kVersionPosition - out.size());
  out.u32(kFormatVersion);
  out.u32(static_cast<uint32_t>(kMetadataTrailerBytes));
  out.raw(kMetadataMagic);
  out.put_u32(kCrcPosition, crc_without_field(out.bytes(), kCrcPosition));
  return out.take();
}

base::Result<MetadataTrailer> trailer_of(std::string_view file) {
  const size_t size = std::min<size_t>(file.size(), kMetadataTrailerBytes);
  return decode_metadata_trailer(file.substr(file.size() - size), static_cast<int64_t>(file.size()));
}

}  // namespace

std::string encode_metadata_file(const Manifest& manifest) {
  std::string out = metadata_pickle(manifest);
  const std::string body = encode_manifest(manifest);
  const std::string table = encode_block_table(block_crcs(body));
  MetadataTrailer trailer;
  trailer.save_id = manifest.save_id;
  trailer.pickle_bytes = static_cast<int64_t>(out.size());
  trailer.manifest_bytes = static_cast<int64_t>(body.size());
  trailer.num_blocks = num_blocks_of(trailer.manifest_bytes);
  trailer.pickle_crc = base::crc32(0, out.data(), out.size());
  trailer.manifest_crc = base::crc32(0, body.data(), body.size());
  trailer.table_crc = base::crc32(0, table.data(), table.size());
  out += body;
  out += table;
  out += encode_trailer(trailer);
  return out;
}

base::Result<MetadataTrailer> decode_metadata_trailer(std::string_view bytes, int64_t file_bytes) {
  if (bytes.size() != static_cast<size_t>(kMetadataTrailerBytes) || bytes.substr(120) != kMetadataMagic) {
    return Status::make(Code::kNotFound, "metadata trailer: none");
  }
  base::ByteReader in(bytes);
  MetadataTrailer trailer;
  trailer.save_id = in.id();
  trailer.pickle_bytes = in.i64();
  trailer.manifest_bytes = in.i64();
  trailer.num_blocks = in.i64();
  const uint32_t block_bytes = in.u32();
  trailer.pickle_crc = in.u32();
  trailer.manifest_crc = in.u32();
  trailer.table_crc = in.u32();
  const uint32_t stored = in.u32();
  const uint32_t flags = in.u32();
  base::ByteReader tail(bytes.substr(kVersionPosition));
  const uint32_t version = tail.u32();
  const int64_t offset = file_bytes - kMetadataTrailerBytes;
  BCP_RETURN_IF_ERROR(check_version("metadata trailer", version).at(offset, kMetadataTrailerBytes));
  const uint32_t computed = crc_without_field(bytes, kCrcPosition);
  if (stored != computed || flags != 0) {
    return Status::make(Code::kCorrupt, text("metadata trailer: CRC is ", computed, ", stored ", stored))
        .at(offset, kMetadataTrailerBytes);
  }
  int64_t sum;
  const bool sane = block_bytes == kBlockBytes &&
                    base::checked_add(trailer.pickle_bytes, trailer.manifest_bytes, &sum) && sum <= file_bytes &&
                    trailer.num_blocks == num_blocks_of(trailer.manifest_bytes) && trailer.file_bytes() == file_bytes;
  if (!sane) {
    return Status::make(Code::kCorrupt, text("metadata trailer: describes a file of another length than ", file_bytes));
  }
  return trailer;
}

base::Result<Manifest> decode_metadata_file(std::string_view bytes) {
  BCP_ASSIGN_OR_RETURN(const MetadataTrailer trailer, trailer_of(bytes));
  const std::string_view body = bytes.substr(trailer.pickle_bytes, trailer.manifest_bytes);
  const std::string_view table = bytes.substr(trailer.table_offset(), 4 * trailer.num_blocks);
  const uint32_t table_crc = base::crc32(0, table.data(), table.size());
  if (table_crc != trailer.table_crc) {
    return Status::make(Code::kCorrupt,
                        text("block table of the manifest: CRC is ", table_crc, ", stored ", trailer.table_crc))
        .at(trailer.table_offset(), 4 * trailer.num_blocks);
  }
  const std::vector<uint32_t> stored = decode_block_table(table);
  const std::vector<uint32_t> computed = block_crcs(body);
  uint32_t whole = 0;
  for (size_t b = 0; b < computed.size(); ++b) {
    if (stored[b] != computed[b]) {
      const auto begin = static_cast<int64_t>(b) * kBlockBytes;
      return Status::make(Code::kCorrupt, text("manifest block ", b, ": CRC is ", computed[b], ", stored ", stored[b]))
          .at(trailer.pickle_bytes + begin, std::min(kBlockBytes, trailer.manifest_bytes - begin));
    }
    whole = base::crc32_combine(whole, computed[b], std::min<size_t>(kBlockBytes, body.size() - b * kBlockBytes));
  }
  if (whole != trailer.manifest_crc) return Status::make(Code::kCorrupt, "manifest: CRC differs from the trailer's");
  BCP_ASSIGN_OR_RETURN(Manifest manifest, decode_manifest(body));
  if (manifest.save_id != trailer.save_id) {
    return Status::make(Code::kCorrupt, "manifest: save id differs from the trailer's");
  }
  return manifest;
}

base::Result<std::string_view> pickle_part(std::string_view file_bytes) {
  BCP_ASSIGN_OR_RETURN(const MetadataTrailer trailer, trailer_of(file_bytes));
  return file_bytes.substr(0, static_cast<size_t>(trailer.pickle_bytes));
}

base::Status check_pickle(std::string_view file_bytes) {
  BCP_ASSIGN_OR_RETURN(const MetadataTrailer trailer, trailer_of(file_bytes));
  const uint32_t crc = base::crc32(0, file_bytes.data(), static_cast<size_t>(trailer.pickle_bytes));
  if (crc != trailer.pickle_crc) {
    return Status::make(Code::kCorrupt, text("pickle of the metadata: CRC is ", crc, ", stored ", trailer.pickle_crc))
        .at(0, trailer.pickle_bytes);
  }
  return Status::ok();
}

}  // namespace bytecheckpoint::format
