// SPDX-License-Identifier: Apache-2.0
#include "csrc/format/torch/pickle_entry.h"

#include <algorithm>
#include <utility>

#include "csrc/base/bytes.h"
#include "csrc/base/crc32.h"
#include "csrc/format/archive/zip_layout.h"

namespace bytecheckpoint::format {
namespace {

using base::Status;
using base::text;

constexpr int64_t kMaxByteOrderBytes = 16;
constexpr int64_t kMagicBytes = 4;

base::Result<bool> is_little_endian(const PickleEntry& found, ArchiveReader* archive) {
  BCP_ASSIGN_OR_RETURN(const ZipEntry* entry, found.find("byteorder"));
  if (entry == nullptr) return true;  // from before torch wrote this entry: always little-endian
  if (!entry->is_plain || entry->bytes > kMaxByteOrderBytes) return false;
  BCP_ASSIGN_OR_RETURN(const int64_t offset, content_offset(*entry, found.directory, archive));
  BCP_ASSIGN_OR_RETURN(const std::string_view order, archive->view(offset, entry->bytes, "byteorder"));
  if (order != "little" && order != "big") return corrupt_archive("byteorder is neither little nor big");
  return order == "little";
}

}  // namespace

/// Says what a zip archive is that torch.save has not written.
std::string what_it_is(const std::vector<ZipEntry>& entries) {
  const auto any_ends_with = [&](std::string_view end) {
    return std::any_of(entries.begin(), entries.end(), [end](const ZipEntry& entry) {
      return entry.name.size() >= end.size() && entry.name.substr(entry.name.size() - end.size()) == end;
    });
  };
  if (any_ends_with("archive_format") || any_ends_with("serialized_exported_program.json")) {
    return "it is a program of torch.export: load it with torch.export.load and save its state_dict";
  }
  if (any_ends_with(".npy"))
    return "it is an archive of numpy: load it with numpy.load and save its arrays with safetensors";
  return "a zip archive, but not one of torch.save";
}

base::Result<std::optional<PickleEntry>> read_pickle_entry(ArchiveReader* archive, const PickleLimits& limits,
                                                           std::string* why_not) {
  const auto left = [&](std::string reason) {
    if (why_not != nullptr) *why_not = std::move(reason);
    return std::optional<PickleEntry>();
  };
  BCP_ASSIGN_OR_RETURN(std::optional<ZipDirectory> directory, read_zip_directory(archive, limits.directory_bytes));
  if (!directory.has_value()) return left(text("its directory is longer than ", limits.directory_bytes, " bytes"));
  PickleEntry found;
  found.directory = std::move(*directory);
  // Like torch, takes the folder of the first entry as that of all entries.
  const std::vector<ZipEntry>& entries = found.directory.entries;
  const std::string_view first = entries.empty() ? std::string_view() : entries[0].name;
  found.folder = first.substr(0, first.find('/'));
  BCP_ASSIGN_OR_RETURN(const ZipEntry* entry, found.find("data.pkl"));
  if (entry == nullptr) return Status::make(base::Code::kUnsupported, what_it_is(entries));
  if (!entry->is_plain) return left("data.pkl is compressed");
  BCP_ASSIGN_OR_RETURN(const bool is_little, is_little_endian(found, archive));
  if (!is_little) return left("a machine with the other byte order wrote it");
  if (entry->bytes > limits.pickle_bytes) return left(text("data.pkl is longer than ", limits.pickle_bytes, " bytes"));

  BCP_ASSIGN_OR_RETURN(found.pickle_offset, content_offset(*entry, found.directory, archive));
  BCP_ASSIGN_OR_RETURN(found.pickle, archive->view(found.pickle_offset, entry->bytes, "data.pkl"));
  const uint32_t crc = base::crc32(0, found.pickle.data(), found.pickle.size());
  // If torch is set to compute no CRCs, it writes zeros.
  found.has_crcs = entry->crc != 0 || crc == 0;
  if (found.has_crcs && crc != entry->crc) {
    return corrupt_archive(text("CRC of data.pkl is ", crc, ", stored ", entry->crc));
  }
  return std::make_optional(std::move(found));
}

base::Result<std::optional<PickleEntry>> read_value_entry(ArchiveReader* archive, int64_t max_pickle_bytes) {
  const std::optional<PickleEntry> other;
  // torch.load reads a file with another begin as a bare pickle, whatever stands at its end.
  if (archive->bytes() < kMagicBytes) return other;
  BCP_ASSIGN_OR_RETURN(const std::string_view magic, archive->view(0, kMagicBytes, "first header"));
  if (base::ByteReader(magic).u32() != zip::kLocalHeader) return other;
  base::Result<std::optional<PickleEntry>> found = read_pickle_entry(archive, {max_pickle_bytes});
  if (!found.is_ok() && found.status().code() == base::Code::kUnsupported) return other;
  BCP_ASSIGN_OR_RETURN(std::optional<PickleEntry> entry, std::move(found));
  if (!entry.has_value()) return other;
  // torch.load recognises a TorchScript archive, which is a program, by this name.
  BCP_ASSIGN_OR_RETURN(const ZipEntry* constants, entry->find("constants.pkl"));
  if (constants != nullptr) return other;
  return entry;
}

}  // namespace bytecheckpoint::format
