// SPDX-License-Identifier: Apache-2.0
#include "tests/fuzz/mutations.h"

#include <array>
#include <utility>
#include <vector>

#include "csrc/base/crc32.h"
#include "csrc/format/archive/archive_reader.h"
#include "csrc/format/archive/zip_directory.h"
#include "csrc/format/data_file.h"
#include "csrc/format/manifest/manifest_rows.h"
#include "csrc/format/manifest/metadata_file.h"
#include "csrc/format/pickle/pickle_opcodes.h"
#include "tests/cpp/zip_of.h"
#include "tests/fuzz/two_parts.h"

namespace bytecheckpoint::fuzz {
namespace {

using namespace format;  // NOLINT

constexpr size_t kMetaCrcPosition = 56;
constexpr size_t kHeaderCrcPosition = 64;
constexpr size_t kDataCrcPosition = 48;

void sign(size_t crc_position, std::string* bytes) {
  base::ByteWriter out(std::move(*bytes));
  const uint32_t crc = crc_without_field(out.bytes(), crc_position);
  out.put_u32(crc_position, crc);
  *bytes = out.take();
}

std::string table_of(std::string_view bytes) {
  std::vector<uint32_t> crcs;
  for (size_t at = 0; at < bytes.size(); at += kBlockBytes) {
    const std::string_view block = bytes.substr(at, kBlockBytes);
    crcs.push_back(base::crc32(0, block.data(), block.size()));
  }
  return encode_block_table(crcs);
}

/// The part of an archive that matters most is its pickle, which is mutated as a pickle.
std::string change_content(std::string_view name, std::string_view content, size_t max_bytes, Change* change) {
  const bool is_pickle = name.size() > 4 && name.substr(name.size() - 4) == ".pkl";
  std::string made = is_pickle ? mutate_pickle(content, max_bytes, change) : std::string();
  return made.empty() ? (*change)(content, max_bytes) : made;
}

}  // namespace

std::string mutate_manifest(std::string_view bytes, size_t max_bytes, Change* change) {
  base::Result<ManifestHead> head = decode_manifest_head(bytes, bytes.size());
  if (!head.is_ok()) return {};
  std::array<std::string, kNumSections> sections;
  size_t others = kManifestHeadBytes + 8 * kNumSections;
  for (size_t s = 0; s < kNumSections; ++s) {
    const ManifestHead::Range& range = head.value().sections[s];
    sections[s] = std::string(bytes.substr(range.offset, range.bytes));
    others += range.bytes;
  }
  std::string& section = sections[change->below(kNumSections)];
  others -= section.size();
  if (others >= max_bytes) return {};
  section = (*change)(section, max_bytes - others);
  base::ByteWriter out;
  out.zeros(kManifestHeadBytes);
  for (size_t s = 0; s < kNumSections; ++s) {
    out.align(8);
    head.value().sections[s] = {out.size(), sections[s].size()};
    out.raw(sections[s]);
  }
  std::string made = out.take();
  made.replace(0, kManifestHeadBytes, encode_manifest_head(head.value()));
  return made;
}

std::string mutate_metadata_file(std::string_view bytes, size_t max_bytes, Change* change) {
  const size_t size = bytes.size();
  if (size < static_cast<size_t>(kMetadataTrailerBytes)) return {};
  std::string trailer(bytes.substr(size - kMetadataTrailerBytes));
  const auto decoded = decode_metadata_trailer(trailer, static_cast<int64_t>(size));
  if (!decoded.is_ok()) return {};
  std::string pickle(bytes.substr(0, static_cast<size_t>(decoded.value().pickle_bytes)));
  std::string manifest(bytes.substr(pickle.size(), static_cast<size_t>(decoded.value().manifest_bytes)));
  const size_t room = max_bytes > size ? max_bytes - size : 0;
  const size_t choice = change->below(8);
  if (choice == 0) {
    pickle = (*change)(pickle, pickle.size() + room);
  } else if (choice == 1) {
    manifest = (*change)(manifest, manifest.size() + room);
  } else {
    std::string made = mutate_manifest(manifest, manifest.size() + room, change);
    if (!made.empty()) manifest = std::move(made);
  }
  // The trailer mostly gets the manifest's save id.
  const auto head = decode_manifest_head(manifest, manifest.size());
  base::ByteWriter fields(std::move(trailer));
  const std::string table = table_of(manifest);
  fields.put_u64(16, pickle.size());
  fields.put_u64(24, manifest.size());
  fields.put_u64(32, table.size() / 4);
  fields.put_u32(44, base::crc32(0, pickle.data(), pickle.size()));
  fields.put_u32(48, base::crc32(0, manifest.data(), manifest.size()));
  fields.put_u32(52, base::crc32(0, table.data(), table.size()));
  trailer = fields.take();
  if (head.is_ok() && choice != 7) {
    trailer.replace(0, 16, reinterpret_cast<const char*>(head.value().save_id.data()), 16);
  }
  if (choice == 7) {
    trailer = (*change)(trailer, trailer.size());
    trailer.resize(static_cast<size_t>(kMetadataTrailerBytes));
  }
  sign(kMetaCrcPosition, &trailer);
  return pickle + manifest + table + trailer;
}

std::string mutate_data_file(std::string_view bytes, size_t max_bytes, Change* change) {
  const auto least = static_cast<size_t>(kHeaderBytes + kDataTrailerBytes);
  if (bytes.size() < least) return {};
  std::string header(bytes.substr(0, kHeaderBytes)), trailer(bytes.substr(bytes.size() - kDataTrailerBytes));
  std::string middle(bytes.substr(kHeaderBytes, bytes.size() - least));
  const size_t choice = change->below(3);
  // The header's fields are at its beginning. The rest is zeros, and the CRC covers them too.
  if (choice == 0) header = (*change)(header.substr(0, 80), 80);
  if (choice == 1) trailer = (*change)(trailer, trailer.size());
  if (choice == 2) middle = (*change)(middle, max_bytes - std::min(max_bytes, least));
  header.resize(static_cast<size_t>(kHeaderBytes));
  trailer.resize(static_cast<size_t>(kDataTrailerBytes));
  sign(kHeaderCrcPosition, &header);
  sign(kDataCrcPosition, &trailer);
  return header + middle + trailer;
}

std::string mutate_archive(std::string_view bytes, size_t max_bytes, Change* change) {
  const ReadBytes read = [bytes](int64_t offset, int64_t size) -> base::Result<std::string> {
    return std::string(bytes.substr(static_cast<size_t>(offset), static_cast<size_t>(size)));
  };
  ArchiveReader reader(static_cast<int64_t>(bytes.size()), read);
  const auto directory = read_zip_directory(&reader);
  if (!directory.is_ok() || !directory.value().has_value() || directory.value()->entries.empty()) return {};
  std::vector<std::pair<std::string, std::string>> entries;
  for (const ZipEntry& entry : directory.value()->entries) {
    const auto offset = content_offset(entry, *directory.value(), &reader);
    if (!offset.is_ok()) return {};
    entries.emplace_back(entry.name,
                         bytes.substr(static_cast<size_t>(offset.value()), static_cast<size_t>(entry.bytes)));
  }
  auto& [name, content] = entries[change->below(entries.size())];
  const size_t room = max_bytes > bytes.size() ? max_bytes - bytes.size() : 0;
  if (change->below(8) == 0) {
    name = (*change)(name, name.size() + room);
  } else {
    content = change_content(name, content, content.size() + room, change);
  }
  return test::zip_of(entries);
}

std::string mutate_pickle(std::string_view bytes, size_t max_bytes, Change* change) {
  if (bytes.size() < 3 || static_cast<uint8_t>(bytes[0]) != 0x80 || bytes.back() != '.') return {};
  std::string body(bytes.substr(2, bytes.size() - 3));
  // A pickler puts nearly everything into one frame.
  if (body.size() > 9 && static_cast<uint8_t>(body[0]) == 0x95) body.erase(0, 9);
  if (max_bytes < body.size() + 16) return {};
  if (change->below(3) != 0) {
    body = (*change)(body, max_bytes - 3);
  } else {
    // Duplicates something, puts a collection around it, or removes it, and leaves the rest as it was.
    static constexpr std::string_view kParts[] = {"(", ")",    "t",    "]",    "}",       "e",    "u",          "a",
                                                  "s", "N",    "\x88", "\x89", "\x85",    "\x86", "\x87",       "\x94",
                                                  "R", "\x81", "b",    "Q",    "K\1",     "h\1",  "X\1\0\0\0a", "C\1a",
                                                  "0", "2",    "\x93", "\x8F", "\x8C\1a", "M\1\1"};
    const size_t at = change->below(body.size() + 1);
    const std::string_view part = kParts[change->below(std::size(kParts))];
    const size_t length = std::min(change->below(4), body.size() - at);
    body.replace(at, length, part);
  }
  return std::string(bytes.substr(0, 2)) + body + ".";
}

std::string mutate_assignment(std::string_view bytes, size_t max_bytes, Change* change) {
  auto [first, second] = TwoParts::of(bytes);
  const size_t room = max_bytes > bytes.size() ? max_bytes - bytes.size() : 0;
  std::string one(first), other(second);
  std::string* part = change->below(3) == 0 ? &one : &other;
  *part = (*change)(*part, part->size() + room);
  return TwoParts::join(one, other);
}

}  // namespace bytecheckpoint::fuzz
