// SPDX-License-Identifier: Apache-2.0
#include "csrc/format/manifest/manifest_rows.h"

namespace bytecheckpoint::format {
namespace {

using base::Code;
using base::Status;
using base::text;

constexpr std::string_view kMagic{"BCPMANI\1", 8};

constexpr uint8_t kFlagRequiresGrad = 1;
constexpr uint8_t kFlagPinMemory = 2;
constexpr uint8_t kFlagPartial = 4;

constexpr uint8_t kItemTensor = 1;
constexpr uint8_t kItemBytes = 2;

bool fail(std::string why, std::string* fault) {
  *fault = std::move(why);
  return false;
}

bool check_data(const Record& record, const tensor::Dims& sizes, int64_t itemsize_bytes, int64_t record_end,
                std::string* fault) {
  int64_t wanted, data_end;
  if (!tensor::checked_numel(sizes, &wanted) || !base::checked_mul(wanted, itemsize_bytes, &wanted) ||
      wanted != record.data_bytes || !base::checked_add(record.data_offset, record.data_bytes, &data_end) ||
      record.data_offset < record.offset || record.data_offset % 64 != 0 || data_end > record_end) {
    return fail("the data are outside their record, or do not have the length of their shape", fault);
  }
  return true;
}

}  // namespace

std::string encode_manifest_head(const ManifestHead& head) {
  base::ByteWriter out;
  out.raw(kMagic);
  out.u32(head.version);
  out.u32(kNumSections);
  out.id(head.save_id);
  for (const ManifestHead::Range& section : head.sections) {
    out.u64(section.offset);
    out.u64(section.bytes);
  }
  return out.take();
}

base::Result<ManifestHead> decode_manifest_head(std::string_view bytes, uint64_t manifest_bytes) {
  base::ByteReader in(bytes);
  const std::string_view magic = in.view(kMagic.size());
  ManifestHead head;
  head.version = in.u32();
  const uint32_t num_sections = in.u32();
  head.save_id = in.id();
  if (!in.ok() || magic != kMagic)
    return Status::make(Code::kCorrupt, "manifest: does not begin with its magic number");
  BCP_RETURN_IF_ERROR(check_version("manifest", head.version, kManifestVersion));
  if (num_sections != kNumSections) return Status::make(Code::kCorrupt, "manifest: wrong section count");
  for (ManifestHead::Range& section : head.sections) {
    section.offset = in.u64();
    section.bytes = in.u64();
    if (!in.ok() || section.offset > manifest_bytes || section.bytes > manifest_bytes - section.offset) {
      return Status::make(Code::kCorrupt, "manifest: section outside the manifest");
    }
  }
  if (head.sections[kFiles].bytes % kRowBytes != 0)
    return Status::make(Code::kCorrupt, "manifest: files: the length is not a multiple of a row");
  if (head.sections[kItems].bytes % kRowBytes != 0)
    return Status::make(Code::kCorrupt, "manifest: items: the length is not a multiple of a row");
  if (head.sections[kDims].bytes % 8 != 0 || head.sections[kChunks].bytes % kRowBytes != 0) {
    return Status::make(Code::kCorrupt, "manifest: dims or chunks: the length is not a multiple of a row");
  }
  return head;
}

ItemRow pack_item(const Item& item, uint64_t name_offset, uint64_t first_dim, uint64_t first_chunk) {
  ItemRow row{};
  row.name_offset = name_offset;
  row.name_bytes = static_cast<uint32_t>(item.fqn.size());
  row.kind = item.is_tensor ? kItemTensor : kItemBytes;
  row.dtype = static_cast<uint8_t>(item.tensor.dtype);
  row.num_dims = static_cast<uint8_t>(item.tensor.sizes.size());
  row.memory_format = item.tensor.memory_format;
  row.flags =
      static_cast<uint8_t>((item.tensor.requires_grad ? kFlagRequiresGrad : 0) |
                           (item.tensor.pin_memory ? kFlagPinMemory : 0) | (item.is_partial ? kFlagPartial : 0));
  row.ordinal = item.ordinal;
  row.first_dim = first_dim;
  row.first_chunk = first_chunk;
  row.num_chunks = static_cast<uint32_t>(item.chunks.size());
  return row;
}

ChunkRow pack_chunk(const Chunk& chunk, uint64_t first_dim) {
  ChunkRow row{};
  row.first_dim = first_dim;
  row.file = chunk.record.file;
  row.kind = static_cast<uint8_t>(chunk.record.kind);
  row.stored_dtype = static_cast<uint8_t>(chunk.record.stored_dtype);
  row.offset = chunk.record.offset;
  row.bytes = chunk.record.bytes;
  row.data_offset = chunk.record.data_offset;
  row.data_bytes = chunk.record.data_bytes;
  return row;
}

FileRow pack_file(const FileEntry& file, uint64_t name_offset) {
  FileRow row{};
  row.name_offset = name_offset;
  row.name_bytes = static_cast<uint32_t>(file.name.size());
  row.rank = file.id.rank;
  row.number = file.id.number;
  row.trailer_crc = file.trailer_crc;
  row.bytes = file.bytes;
  row.file_id = file.id.file_id;
  return row;
}

bool unpack_item(const ItemRow& row, uint32_t version, Item* item, std::string* fault) {
  item->ordinal = row.ordinal;
  item->is_tensor = row.kind == kItemTensor;
  if (item->is_tensor) {
    if (tensor::find_dtype(row.dtype) == nullptr || row.memory_format > 2) return fail("unknown dtype", fault);
    item->tensor.dtype = static_cast<tensor::DType>(row.dtype);
    item->tensor.memory_format = row.memory_format;
    item->tensor.requires_grad = (row.flags & kFlagRequiresGrad) != 0;
    item->tensor.pin_memory = (row.flags & kFlagPinMemory) != 0;
    item->is_partial = (row.flags & kFlagPartial) != 0;
    if (item->is_partial && version < kPartialItemsVersion)
      return fail("is partial, but a manifest of version 1 has no partial items", fault);
  } else if (row.kind != kItemBytes || row.num_dims != 0 || row.num_chunks != 1) {
    return fail("unknown kind", fault);
  }
  int64_t numel;
  return tensor::checked_numel(item->tensor.sizes, &numel) || fail("impossible shape", fault);
}

bool unpack_chunk(const ChunkRow& row, const Item& item, int64_t file_bytes, Chunk* chunk, std::string* fault) {
  const tensor::Box& box = chunk->box;
  if (!tensor::is_inside(box, item.tensor.sizes)) {
    return fail(text("chunk at ", tensor::to_text(box.offsets), " of ", tensor::to_text(box.sizes), " outside shape ",
                     tensor::to_text(item.tensor.sizes)),
                fault);
  }
  Record& record = chunk->record;
  record.kind = static_cast<RecordKind>(row.kind);
  record.file = row.file;
  record.offset = row.offset;
  record.bytes = row.bytes;
  record.data_offset = row.data_offset;
  record.data_bytes = row.data_bytes;
  const bool bytes_record = record.kind == RecordKind::kBytes;
  if (row.kind < 1 || row.kind > 3 || bytes_record == item.is_tensor) return fail("the record has a wrong kind", fault);
  int64_t end;
  if (!base::checked_add(record.offset, record.bytes, &end) || record.offset < kHeaderBytes || end > file_bytes) {
    return fail("the record is outside its file", fault);
  }
  if (record.kind != RecordKind::kTensor) return true;
  const tensor::DTypeInfo* info = tensor::find_plain_dtype(row.stored_dtype);
  if (info == nullptr) return fail("the record has an unknown dtype", fault);
  record.stored_dtype = info->dtype;
  return check_data(record, box.sizes, info->itemsize_bytes, end, fault);
}

bool unpack_file(const FileRow& row, FileEntry* file, std::string* fault) {
  file->id.rank = row.rank;
  file->id.number = row.number;
  file->trailer_crc = row.trailer_crc;
  file->bytes = row.bytes;
  file->id.file_id = row.file_id;
  // The name must follow from the id, so it cannot lead out of the directory.
  if (file->name != data_file_name(file->id))
    return fail(text("file '", file->name, "': the name does not match its id"), fault);
  if (file->bytes < kHeaderBytes + kDataTrailerBytes)
    return fail(text("file '", file->name, "': impossible size"), fault);
  return true;
}

}  // namespace bytecheckpoint::format
