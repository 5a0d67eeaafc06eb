// SPDX-License-Identifier: Apache-2.0
#include "csrc/format/torch/torch_file_layout.h"

#include <utility>

#include "csrc/base/crc32.h"
#include "csrc/base/status.h"
#include "csrc/format/archive/zip_headers.h"
#include "csrc/format/archive/zip_layout.h"

namespace bytecheckpoint::format {
namespace {

using base::text;

constexpr int64_t kStorageAlignment = 64;
constexpr uint16_t kFlagsOfStorage = 1 << 3;  // CRC and sizes follow the data
constexpr int64_t kMaxPlain = 0xFFFFFFFE;     // what a field of 32 bits can hold
constexpr size_t kMaxPlainEntries = 0xFFFE;

bool is_large(int64_t number) {
  return number > kMaxPlain;
}

uint32_t plain_or_mark(int64_t number) {
  return is_large(number) ? zip::kInZip64 : static_cast<uint32_t>(number);
}

std::string zip64_field(const std::vector<int64_t>& values) {
  if (values.empty()) return {};
  base::ByteWriter out;
  out.u16(zip::kExtraZip64);
  out.u16(static_cast<uint16_t>(8 * values.size()));
  for (const int64_t value : values) out.u64(static_cast<uint64_t>(value));
  return out.take();
}

uint16_t version_of(int64_t bytes, int64_t header_offset) {
  return is_large(bytes) || is_large(header_offset) ? zip::kVersionZip64 : zip::kVersionPlain;
}

}  // namespace

TorchFileLayout::TorchFileLayout(std::string_view pickle, const std::vector<int64_t>& storage_bytes) {
  base::ByteWriter head;
  const auto add_small = [&](const char* name, std::string_view content) {
    const auto bytes = static_cast<int64_t>(content.size());
    small_.push_back({text("archive/", name), static_cast<int64_t>(head.size()), bytes,
                      base::crc32(0, content.data(), content.size())});
    zip::write_local_header(
        {small_.back().name, zip::kVersionPlain, 0, small_.back().crc, static_cast<uint32_t>(content.size())}, "",
        &head);
    head.raw(content);
  };
  add_small("data.pkl", pickle);
  add_small("byteorder", "little");
  add_small("version", "3\n");
  head_ = head.take();
  auto at = static_cast<int64_t>(head_.size());
  for (size_t s = 0; s < storage_bytes.size(); ++s) {
    storages_.push_back({text("archive/data/", s), at, storage_bytes[s], 0});
    if (s > 0) {
      base::ByteWriter descriptor;
      write_descriptor(s - 1, 0, &descriptor);
      at += static_cast<int64_t>(descriptor.size());
      storages_.back().header_offset = at;
    }
    base::ByteWriter header;
    write_header(s, at, &header);
    storage_offsets_.push_back(at + static_cast<int64_t>(header.size()));
    at = storage_offsets_.back() + storage_bytes[s];
  }
  if (storages_.empty()) at = 0;  // what is behind the last storage is then all of the file
  const std::vector<uint32_t> crcs(storages_.size(), 0);
  file_bytes_ = at + static_cast<int64_t>(before(storages_.size(), crcs).size());
}

std::string TorchFileLayout::before(size_t number, const std::vector<uint32_t>& crcs) const {
  base::ByteWriter out;
  int64_t begin = 0;
  if (number == 0) {
    out.raw(head_);
  } else {
    begin = storage_offsets_[number - 1] + storages_[number - 1].bytes;
    write_descriptor(number - 1, crcs[number - 1], &out);
  }
  if (number < storages_.size()) {
    write_header(number, storages_[number].header_offset, &out);
  } else {
    write_directory(crcs, begin + static_cast<int64_t>(out.size()), &out);
  }
  return out.take();
}

void TorchFileLayout::write_descriptor(size_t storage, uint32_t crc, base::ByteWriter* out) const {
  const int64_t bytes = storages_[storage].bytes;
  out->u32(zip::kDataDescriptor);
  out->u32(crc);
  for (int field = 0; field < 2; ++field) {
    if (is_large(bytes)) {
      out->u64(static_cast<uint64_t>(bytes));
    } else {
      out->u32(static_cast<uint32_t>(bytes));
    }
  }
}

void TorchFileLayout::write_header(size_t storage, int64_t header_offset, base::ByteWriter* out) const {
  const Entry& entry = storages_[storage];
  // Readers of zip64 look for sizes of 8 bytes in the descriptor if this field is there.
  std::string extra = is_large(entry.bytes) ? zip64_field({0, 0}) : std::string();
  const int64_t unpadded =
      header_offset + zip::kLocalHeaderBytes + static_cast<int64_t>(entry.name.size() + extra.size());
  extra += zip::padding_to(unpadded, kStorageAlignment);
  zip::write_local_header(
      {entry.name, version_of(entry.bytes, 0), kFlagsOfStorage, 0, is_large(entry.bytes) ? zip::kInZip64 : 0}, extra,
      out);
}

void TorchFileLayout::write_directory(const std::vector<uint32_t>& crcs, int64_t offset, base::ByteWriter* out) const {
  const size_t begin = out->size();
  const auto add = [&](const Entry& entry, uint16_t flags, uint32_t crc) {
    std::vector<int64_t> large;
    if (is_large(entry.bytes)) large = {entry.bytes, entry.bytes};
    if (is_large(entry.header_offset)) large.push_back(entry.header_offset);
    zip::write_central_entry(
        {entry.name, version_of(entry.bytes, entry.header_offset), flags, crc, plain_or_mark(entry.bytes)},
        zip64_field(large), plain_or_mark(entry.header_offset), out);
  };
  for (const Entry& entry : small_) add(entry, 0, entry.crc);
  for (size_t s = 0; s < storages_.size(); ++s) add(storages_[s], kFlagsOfStorage, crcs[s]);
  const auto directory_bytes = static_cast<int64_t>(out->size() - begin);
  const size_t num_entries = small_.size() + storages_.size();
  if (is_large(offset) || is_large(directory_bytes) || num_entries > kMaxPlainEntries) {
    out->u32(zip::kZip64End);
    out->u64(44);  // length of the rest of this record
    out->u16(zip::kVersionZip64);
    out->u16(zip::kVersionZip64);
    out->u32(0);
    out->u32(0);
    out->u64(num_entries);
    out->u64(num_entries);
    out->u64(static_cast<uint64_t>(directory_bytes));
    out->u64(static_cast<uint64_t>(offset));
    out->u32(zip::kZip64Locator);
    out->u32(0);
    out->u64(static_cast<uint64_t>(offset + directory_bytes));
    out->u32(1);
  }
  zip::write_end(num_entries > kMaxPlainEntries ? 0xFFFF : static_cast<uint16_t>(num_entries),
                 plain_or_mark(directory_bytes), plain_or_mark(offset), out);
}

}  // namespace bytecheckpoint::format
