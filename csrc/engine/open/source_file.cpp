// SPDX-License-Identifier: Apache-2.0
#include "csrc/engine/open/source_file.h"

#include <algorithm>

#include "csrc/base/bytes.h"
#include "csrc/base/crc32.h"
#include "csrc/engine/open/planned_files.h"

namespace bytecheckpoint::engine {
namespace {

using base::Code;
using base::Status;
using base::text;

/// Whether this is a data file of ours, by its first and last 8 bytes. If only one of them says so, the other is
/// damaged.
base::Result<bool> is_ours(io::File& file, int64_t size) {
  if (size < 8) return false;
  BCP_ASSIGN_OR_RETURN(const std::string first, file.read(0, 8));
  BCP_ASSIGN_OR_RETURN(const std::string last, file.read(size - 8, 8));
  const bool begins = first == format::kDataMagic, ends = last == format::kDataTrailerMagic;
  if (begins == ends) return begins;
  return Status::make(Code::kCorrupt, begins ? "this data file has no trailer" : "this data file has no header")
      .at(begins ? size - 8 : 0, 8)
      .in_file(file.path());
}

base::Result<format::DataTrailer> read_trailer(io::File& file, int64_t file_bytes) {
  if (file_bytes < format::kHeaderBytes + format::kDataTrailerBytes) {
    return Status::make(Code::kCorrupt,
                        text("read(", file.path(), "): the file has ", file_bytes, " bytes, too few for a data file"),
                        file.path());
  }
  BCP_ASSIGN_OR_RETURN(const std::string tail,
                       file.read(file_bytes - format::kDataTrailerBytes, format::kDataTrailerBytes));
  base::Result<format::DataTrailer> trailer = format::decode_data_trailer(tail, file_bytes);
  if (trailer.is_ok()) return trailer;
  return trailer.status().at(file_bytes - format::kDataTrailerBytes, format::kDataTrailerBytes).in_file(file.path());
}

Status compare_with_manifest(const io::File& file, const format::FileEntry& entry, const format::DataTrailer& trailer) {
  if (trailer.id.file_id == entry.id.file_id && trailer.trailer_crc == entry.trailer_crc &&
      trailer.id.rank == entry.id.rank && trailer.id.number == entry.id.number) {
    return Status::ok();
  }
  return Status::make(Code::kCorrupt, text("the trailer is that of file ", base::to_hex(trailer.id.file_id),
                                           " with CRC ", trailer.trailer_crc, ", but the metadata name file ",
                                           base::to_hex(entry.id.file_id), " with CRC ", entry.trailer_crc))
      .at(entry.bytes - format::kDataTrailerBytes, format::kDataTrailerBytes)
      .in_file(file.path());
}

base::Result<std::vector<uint32_t>> read_table(io::File& file, const format::DataTrailer& trailer) {
  BCP_ASSIGN_OR_RETURN(const std::string table, file.read(trailer.end_of_records, trailer.table_bytes()));
  const uint32_t crc = base::crc32(0, table.data(), table.size());
  if (crc != trailer.table_crc) {
    return Status::make(Code::kCorrupt, text("the block table has CRC ", base::crc_text(crc), ", but stored is ",
                                             base::crc_text(trailer.table_crc)))
        .at(trailer.end_of_records, trailer.table_bytes())
        .in_file(file.path());
  }
  return format::decode_block_table(table);
}

}  // namespace

base::Result<std::shared_ptr<const SourceFile>> SourceFile::open(const std::string& directory,
                                                                 const format::Manifest& manifest,
                                                                 const format::FileEntry& entry) {
  auto source = std::make_shared<SourceFile>();
  source->directory = directory;
  source->entry = entry;
  BCP_ASSIGN_OR_RETURN(io::File file, source->reopen(/*direct=*/false));
  source->path = file.path();
  BCP_ASSIGN_OR_RETURN(const int64_t size, file.size());
  if (manifest.foreign.has_value()) {
    source->end_of_records = size;
    if (!entry.packing.is_packed()) {
      BCP_ASSIGN_OR_RETURN(source->has_checksums, is_ours(file, size));
    }
    if (!source->has_checksums) return std::shared_ptr<const SourceFile>(std::move(source));
  } else if (size != entry.bytes) {
    return Status::make(Code::kCorrupt,
                        text("read(", source->path, "): the file has ", size, " bytes, but must have ", entry.bytes),
                        source->path);
  }
  BCP_ASSIGN_OR_RETURN(const format::DataTrailer trailer, read_trailer(file, size));
  if (!manifest.foreign.has_value()) BCP_RETURN_IF_ERROR(compare_with_manifest(file, entry, trailer));
  source->has_checksums = true;
  source->end_of_records = trailer.end_of_records;
  BCP_ASSIGN_OR_RETURN(source->block_crcs, read_table(file, trailer));
  return std::shared_ptr<const SourceFile>(std::move(source));
}

base::Result<std::shared_ptr<const SourceFile>> SourceFile::of_one_file(io::File* file) {
  auto source = std::make_shared<SourceFile>();
  source->path = file->path();
  BCP_ASSIGN_OR_RETURN(const int64_t size, file->size());
  BCP_ASSIGN_OR_RETURN(const format::DataTrailer trailer, read_trailer(*file, size));
  source->has_checksums = true;
  source->end_of_records = trailer.end_of_records;
  BCP_ASSIGN_OR_RETURN(source->block_crcs, read_table(*file, trailer));
  return std::shared_ptr<const SourceFile>(std::move(source));
}

base::Result<io::File> SourceFile::reopen(bool direct) const {
  return open_planned(directory, entry, direct);
}

Status SourceFile::check_blocks(const uint8_t* bytes, int64_t offset, int64_t size) const {
  for (int64_t begin = offset; begin < offset + size; begin += format::kBlockBytes) {
    const int64_t part = std::min(format::kBlockBytes, offset + size - begin);
    const uint32_t computed = base::crc32(0, bytes + (begin - offset), static_cast<size_t>(part));
    const uint32_t stored = block_crcs[static_cast<size_t>(begin / format::kBlockBytes)];
    if (computed != stored) {
      return Status::make(Code::kCorrupt,
                          text("read(", path, ", offset=", begin, ", ", part, " bytes): the block has CRC ",
                               base::crc_text(computed), ", but stored is ", base::crc_text(stored)),
                          path);
    }
  }
  return Status::ok();
}

Status SourceFile::behind_the_records(int64_t offset) const {
  return Status::make(Code::kCorrupt,
                      text("read(", path, ", offset=", offset, "): the metadata name a record there, but the ",
                           has_checksums ? "records end at " : "file ends at ", end_of_records),
                      path);
}

}  // namespace bytecheckpoint::engine
