// SPDX-License-Identifier: Apache-2.0
#include "csrc/format/archive/zip_headers.h"

#include "csrc/format/archive/zip_layout.h"

namespace bytecheckpoint::format::zip {
namespace {

constexpr uint16_t kDosTime = 0;                      // midnight
constexpr uint16_t kDosDate = (0 << 9) | 1 << 5 | 1;  // 1980-01-01
constexpr uint16_t kExtraPadding = 0x4246;            // "FB", the id that torch pads with
constexpr int64_t kExtraHeadBytes = 4;

/// Writes the fields that local headers and central entries have in common, from "version needed" to "name length".
void shared_fields(const EntryHead& entry, base::ByteWriter* out) {
  out->u16(entry.version);
  out->u16(entry.flags);
  out->u16(0);  // stored
  out->u16(kDosTime);
  out->u16(kDosDate);
  out->u32(entry.crc);
  out->u32(entry.bytes);
  out->u32(entry.bytes);
  out->u16(static_cast<uint16_t>(entry.name.size()));
}

}  // namespace

void write_local_header(const EntryHead& entry, std::string_view extra, base::ByteWriter* out) {
  out->u32(kLocalHeader);
  shared_fields(entry, out);
  out->u16(static_cast<uint16_t>(extra.size()));
  out->raw(entry.name);
  out->raw(extra);
}

void write_central_entry(const EntryHead& entry, std::string_view extra, uint32_t header_offset,
                         base::ByteWriter* out) {
  out->u32(kCentralEntry);
  out->u16(entry.version);
  shared_fields(entry, out);
  out->u16(static_cast<uint16_t>(extra.size()));
  out->u16(0);  // comment
  out->u16(0);  // disk
  out->u16(0);  // internal attributes
  out->u32(0);  // external attributes
  out->u32(header_offset);
  out->raw(entry.name);
  out->raw(extra);
}

void write_end(uint16_t num_entries, uint32_t directory_bytes, uint32_t directory_offset, base::ByteWriter* out) {
  out->u32(kEnd);
  out->u16(0);
  out->u16(0);
  out->u16(num_entries);
  out->u16(num_entries);
  out->u32(directory_bytes);
  out->u32(directory_offset);
  out->u16(0);
}

std::string padding_to(int64_t unpadded, int64_t alignment) {
  const int64_t begin = unpadded + kExtraHeadBytes;
  const auto fill = static_cast<uint16_t>(base::align_up(begin, alignment) - begin);
  base::ByteWriter out;
  out.u16(kExtraPadding);
  out.u16(fill);
  out.zeros(fill);
  return out.take();
}

}  // namespace bytecheckpoint::format::zip
