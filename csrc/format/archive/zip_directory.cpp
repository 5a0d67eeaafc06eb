// SPDX-License-Identifier: Apache-2.0
#include "csrc/format/archive/zip_directory.h"

#include <algorithm>
#include <string>

#include "csrc/base/bytes.h"
#include "csrc/format/archive/zip_layout.h"

namespace bytecheckpoint::format {
namespace {

using base::Code;
using base::Status;
using base::text;
using namespace zip;  // NOLINT: the numbers of the format

constexpr int64_t kZip64EndBytes = 56;
constexpr int64_t kZip64LocatorBytes = 20;
constexpr int64_t kEndBytes = 22;
constexpr int64_t kMaxCommentBytes = 0xFFFF;
// torch writes about 500 bytes of directory for one tensor.
constexpr int64_t kTailBytes = 8 << 10;

constexpr uint16_t kFlagEncrypted = 1;
// Of the attributes of an entry. torch reads nothing of a folder, and leaves memory as it was.
constexpr uint32_t kIsFolder = 0x10;

/// Place of the directory, and the number of its entries.
struct Extent {
  int64_t offset = 0;
  int64_t bytes = 0;
  uint64_t entries = 0;
};

/// Returns the position of the end record in the last bytes of an archive: of the last one whose comment ends with the
/// archive.
std::optional<size_t> find_end(std::string_view tail) {
  for (size_t at = tail.size() < kEndBytes ? 0 : tail.size() - kEndBytes + 1; at-- > 0;) {
    base::ByteReader in(tail.substr(at));
    if (in.u32() != kEnd) continue;
    in.skip(16);
    if (in.u16() == in.remaining()) return at;
  }
  return std::nullopt;
}

Status no_end(ArchiveReader* archive) {
  const int64_t magic_bytes = std::min<int64_t>(4, archive->bytes());
  BCP_ASSIGN_OR_RETURN(const std::string_view magic, archive->view(0, magic_bytes, "magic"));
  if (base::ByteReader(magic).u32() == kLocalHeader)
    return corrupt_archive("begins as a zip archive, but does not end as one");
  return Status::make(
      Code::kUnsupported,
      "not an archive of torch.save; safetensors, and files that stream extensions transformed, cannot be read");
}

/// \param end  Offset of the end record in the archive.
/// \param in  Reads the fields of the end record, from its start.
base::Result<Extent> read_extent(int64_t end, base::ByteReader in, ArchiveReader* archive) {
  Extent extent;
  in.skip(4);
  uint64_t disks = in.u32();  // the number of this disk, and of that of the directory
  uint64_t entries_here = in.u16();
  extent.entries = in.u16();
  extent.bytes = in.u32();
  extent.offset = in.u32();
  int64_t limit = end;
  // torch always writes the 64-bit records, even if they are not needed.
  if (end >= kZip64LocatorBytes) {
    BCP_ASSIGN_OR_RETURN(const std::string_view bytes,
                         archive->view(end - kZip64LocatorBytes, kZip64LocatorBytes, "zip64 locator"));
    base::ByteReader locator(bytes);
    if (locator.u32() == kZip64Locator) {
      disks |= locator.u32();
      limit = locator.i64();
      disks |= locator.u32() ^ 1;  // how many there are
      BCP_ASSIGN_OR_RETURN(const std::string_view record, archive->view(limit, kZip64EndBytes, "zip64 end record"));
      base::ByteReader wide(record);
      if (wide.u32() != kZip64End) return corrupt_archive("no zip64 end record where its locator says");
      wide.skip(12);
      disks |= wide.u64();
      entries_here = wide.u64();
      extent.entries = wide.u64();
      extent.bytes = wide.i64();
      extent.offset = wide.i64();
    }
  }
  if (disks != 0 || entries_here != extent.entries) return corrupt_archive("its end says that it spans several disks");
  int64_t behind;
  if (!base::checked_add(extent.offset, extent.bytes, &behind) || behind > limit) {
    return corrupt_archive(text("directory, ", extent.bytes, " bytes at ", extent.offset, ", reaches beyond ", limit));
  }
  return extent;
}

/// Takes the values of fields that are all ones from the zip64 extra field, which has them in this order.
bool widen(std::string_view extra, int64_t* bytes, int64_t* stored_bytes, int64_t* header_offset) {
  base::ByteReader fields(extra);
  while (fields.ok() && fields.remaining() >= 4) {
    const uint16_t id = fields.u16();
    base::ByteReader field(fields.view(fields.u16()));
    if (id != kExtraZip64) continue;
    for (int64_t* value : {bytes, stored_bytes, header_offset}) {
      if (*value == kInZip64) *value = field.i64();
    }
    return field.ok() && *bytes >= 0 && *stored_bytes >= 0 && *header_offset >= 0;
  }
  // Without that field, all ones are an ordinary number. Padding need not be a valid field; that is not checked here.
  return true;
}

bool is_plain(uint16_t flags, uint16_t method) {
  return method == 0 && (flags & kFlagEncrypted) == 0;
}

bool read_entry(base::ByteReader* in, ZipEntry* entry) {
  const uint32_t signature = in->u32();
  in->skip(4);
  const uint16_t flags = in->u16();
  const uint16_t method = in->u16();
  in->skip(4);
  entry->crc = in->u32();
  int64_t stored_bytes = in->u32();
  entry->bytes = in->u32();
  const uint16_t name_bytes = in->u16();
  const uint16_t extra_bytes = in->u16();
  const uint16_t comment_bytes = in->u16();
  const uint16_t disk = in->u16();
  in->skip(2);
  const bool is_folder = (in->u32() & kIsFolder) != 0;
  entry->header_offset = in->u32();
  entry->name = in->view(name_bytes);
  const std::string_view extra = in->view(extra_bytes);
  in->skip(comment_bytes);
  if (!in->ok() || signature != kCentralEntry || !widen(extra, &entry->bytes, &stored_bytes, &entry->header_offset)) {
    return false;
  }
  entry->is_plain = is_plain(flags, method);
  return disk == 0 && !(is_folder && entry->bytes > 0) && (!entry->is_plain || entry->bytes == stored_bytes);
}

}  // namespace

base::Result<const ZipEntry*> ZipDirectory::find(std::string_view folder, std::string_view name) const {
  const ZipEntry* found = nullptr;
  for (const ZipEntry& entry : entries) {
    const bool same = entry.name.size() == folder.size() + 1 + name.size() &&
                      entry.name.substr(0, folder.size()) == folder && entry.name[folder.size()] == '/' &&
                      entry.name.substr(folder.size() + 1) == name;
    if (!same) continue;
    if (found != nullptr) return corrupt_archive(text("there are two entries with the name ", name));
    found = &entry;
  }
  return found;
}

base::Result<std::optional<ZipDirectory>> read_zip_directory(ArchiveReader* archive, int64_t max_bytes) {
  BCP_ASSIGN_OR_RETURN(std::string_view tail, archive->tail(kTailBytes));
  std::optional<size_t> at = find_end(tail);
  if (!at.has_value() && archive->bytes() > kTailBytes) {
    BCP_ASSIGN_OR_RETURN(tail, archive->tail(kEndBytes + kMaxCommentBytes));
    at = find_end(tail);
  }
  if (!at.has_value()) return no_end(archive);
  const int64_t end = archive->bytes() - static_cast<int64_t>(tail.size() - *at);
  BCP_ASSIGN_OR_RETURN(const Extent extent, read_extent(end, base::ByteReader(tail.substr(*at)), archive));
  if (extent.bytes > max_bytes) return std::optional<ZipDirectory>();

  BCP_ASSIGN_OR_RETURN(const std::string_view bytes, archive->view(extent.offset, extent.bytes, "directory"));
  ZipDirectory directory;
  directory.begin = extent.offset;
  base::ByteReader in(bytes);
  while (in.remaining() != 0) {
    if (!read_entry(&in, &directory.entries.emplace_back())) {
      return corrupt_archive(text("directory: entry ", directory.entries.size() - 1, " is damaged"));
    }
  }
  if (directory.entries.size() != extent.entries) {
    return corrupt_archive(
        text("directory: ", directory.entries.size(), " entries, but the end record says ", extent.entries));
  }
  return std::optional<ZipDirectory>(std::move(directory));
}

Status check_header(const ZipEntry& entry, ArchiveReader* archive) {
  const auto name_bytes = static_cast<int64_t>(entry.name.size());
  BCP_ASSIGN_OR_RETURN(const std::string_view header,
                       archive->view(entry.header_offset, kLocalHeaderBytes + name_bytes, "header of an entry"));
  base::ByteReader in(header);
  in.skip(6);
  const uint16_t flags = in.u16();
  const uint16_t method = in.u16();
  if (header.substr(kLocalHeaderBytes) == entry.name && is_plain(flags, method) == entry.is_plain) return Status::ok();
  return corrupt_archive(
      text("the header at ", entry.header_offset, " is not that of '", entry.name, "', as the directory says"));
}

base::Result<int64_t> content_offset(const ZipEntry& entry, const ZipDirectory& directory, ArchiveReader* archive) {
  BCP_ASSIGN_OR_RETURN(const std::string_view header,
                       archive->view(entry.header_offset, kLocalHeaderBytes, "header of an entry"));
  return content_offset(entry, directory, header);
}

base::Result<int64_t> content_offset(const ZipEntry& entry, const ZipDirectory& directory, std::string_view header) {
  base::ByteReader in(header);
  if (in.u32() != kLocalHeader) return corrupt_archive(text("no header of an entry at ", entry.header_offset));
  in.skip(22);
  const int64_t offset = entry.header_offset + kLocalHeaderBytes + in.u16() + in.u16();
  int64_t end;
  if (!base::checked_add(offset, entry.bytes, &end) || end > directory.begin) {
    return corrupt_archive(text("content of an entry, ", entry.bytes, " bytes at ", offset, ", reaches beyond ",
                                directory.begin, ", where the directory starts"));
  }
  return offset;
}

}  // namespace bytecheckpoint::format
