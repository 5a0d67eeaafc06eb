// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <string>
#include <string_view>

#include "csrc/base/bytes.h"

namespace bytecheckpoint::format::zip {

inline constexpr uint16_t kVersionPlain = 20;
inline constexpr uint16_t kVersionZip64 = 45;

/// What both headers of an entry say (local header and central directory). The entry is stored, not compressed. All
/// times are 1980-01-01, so that equal contents give equal bytes.
struct EntryHead {
  std::string_view name;
  uint16_t version = kVersionPlain;
  uint16_t flags = 0;
  uint32_t crc = 0;
  uint32_t bytes = 0;
};

/// Append one header of an entry, or the end record of an archive. `extra` is complete extra fields; offsets count from
/// the start of the archive.
void write_local_header(const EntryHead& entry, std::string_view extra, base::ByteWriter* out);
void write_central_entry(const EntryHead& entry, std::string_view extra, uint32_t header_offset, base::ByteWriter* out);
void write_end(uint16_t num_entries, uint32_t directory_bytes, uint32_t directory_offset, base::ByteWriter* out);

/// Returns an extra field of zeros, under the id that torch uses for padding. With it, the content begins at the next
/// multiple of `alignment` that leaves room for the field.
/// \param unpadded  Where the content would begin without this field.
std::string padding_to(int64_t unpadded, int64_t alignment);

}  // namespace bytecheckpoint::format::zip
