// SPDX-License-Identifier: Apache-2.0
#include "csrc/format/manifest/metadata_file.h"

#include <algorithm>
#include <cstring>

#include "csrc/base/crc32.h"
#include "csrc/format/manifest/manifest_encoder.h"

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

/// Returns the CRC of the whole, computed from the CRCs of its blocks.
uint32_t joined(const std::vector<uint32_t>& crcs, size_t bytes) {
  uint32_t whole = 0;
  for (size_t b = 0; b < crcs.size(); ++b) {
    whole = base::crc32_combine(whole, crcs[b], std::min<size_t>(kBlockBytes, bytes - b * kBlockBytes));
  }
  return whole;
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
  const ManifestEncoder encoder(manifest);
  const size_t table_bytes = 4 * num_blocks_of(static_cast<int64_t>(encoder.num_bytes()));
  // One buffer for the whole file, which has hundreds of megabytes for thousands of ranks.
  std::string out = metadata_pickle(manifest, encoder.num_bytes() + table_bytes + kMetadataTrailerBytes);
  MetadataTrailer trailer;
  trailer.save_id = manifest.save_id;
  trailer.pickle_bytes = static_cast<int64_t>(out.size());
  trailer.manifest_bytes = static_cast<int64_t>(encoder.num_bytes());
  trailer.num_blocks = num_blocks_of(trailer.manifest_bytes);
  trailer.pickle_crc = base::crc32(0, out.data(), out.size());
  encoder.append_to(&out);
  const std::string_view body = std::string_view(out).substr(static_cast<size_t>(trailer.pickle_bytes));
  const std::vector<uint32_t> crcs = block_crcs(body);
  const std::string table = encode_block_table(crcs);
  trailer.manifest_crc = joined(crcs, body.size());
  trailer.table_crc = base::crc32(0, table.data(), table.size());
  out += table;
  out += encode_trailer(trailer);
  return out;
}

base::Result<MetadataTrailer> decode_metadata_trailer(std::string_view bytes, int64_t file_bytes) {
  if (bytes.size() != static_cast<size_t>(kMetadataTrailerBytes) || bytes.substr(120) != kMetadataMagic) {
    return Status::make(Code::kNotFound, "metadata trailer: there is none");
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
    return Status::make(Code::kCorrupt,
                        text("metadata trailer: does not describe a file of this length: ", file_bytes));
  }
  return trailer;
}

Status check_table(const MetadataTrailer& trailer, std::string_view table) {
  const uint32_t computed = base::crc32(0, table.data(), table.size());
  if (computed == trailer.table_crc) return Status::ok();
  return Status::make(Code::kCorrupt,
                      text("block table of the manifest: CRC is ", computed, ", stored ", trailer.table_crc))
      .at(trailer.table_offset(), 4 * trailer.num_blocks);
}

Status wrong_block(const MetadataTrailer& trailer, int64_t number, uint32_t computed, uint32_t stored) {
  const int64_t begin = number * kBlockBytes;
  return Status::make(Code::kCorrupt, text("manifest block ", number, ": CRC is ", computed, ", stored ", stored))
      .at(trailer.pickle_bytes + begin, std::min(kBlockBytes, trailer.manifest_bytes - begin));
}

base::Result<Manifest> decode_metadata_file(std::string_view bytes) {
  BCP_ASSIGN_OR_RETURN(const MetadataTrailer trailer, trailer_of(bytes));
  const std::string_view body = bytes.substr(trailer.pickle_bytes, trailer.manifest_bytes);
  const std::string_view table = bytes.substr(trailer.table_offset(), 4 * trailer.num_blocks);
  BCP_RETURN_IF_ERROR(check_table(trailer, table));
  const std::vector<uint32_t> stored = decode_block_table(table);
  const std::vector<uint32_t> computed = block_crcs(body);
  for (size_t b = 0; b < computed.size(); ++b) {
    if (stored[b] != computed[b]) return wrong_block(trailer, static_cast<int64_t>(b), computed[b], stored[b]);
  }
  if (joined(computed, body.size()) != trailer.manifest_crc)
    return Status::make(Code::kCorrupt, "manifest: CRC differs from the trailer's");
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
