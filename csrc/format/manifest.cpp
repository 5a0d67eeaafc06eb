// SPDX-License-Identifier: Apache-2.0
#include "csrc/format/manifest.h"

#include <algorithm>
#include <array>
#include <cstring>

#include "csrc/base/utf8.h"

namespace bytecheckpoint::format {
namespace {

using base::Code;
using base::Status;
using base::text;

constexpr std::string_view kMagic{"BCPMANI\1", 8};

/// Sections in the order of the directory; on disk, never renumber.
enum Section : size_t { kStrings, kItems, kDims, kChunks, kFiles, kPlannerData, kUserMetadata, kCheckpointId, kCount };

constexpr size_t kEntryBytes = 48;  // of items, chunks and files alike
constexpr size_t kDirectoryBytes = 16 * kCount;
constexpr size_t kHeadBytes = 8 + 4 + 4 + 16 + kDirectoryBytes;

constexpr uint8_t kFlagRequiresGrad = 1;
constexpr uint8_t kFlagPinMemory = 2;

constexpr uint8_t kItemTensor = 1;
constexpr uint8_t kItemBytes = 2;

void append_dims(const tensor::Dims& dims, base::ByteWriter* out) {
  for (int64_t value : dims) out->i64(value);
}

/// What the sections of an encoded manifest are built from.
struct Encoder {
  std::array<base::ByteWriter, kCount> sections;

  void name(const std::string& value, base::ByteWriter* entry) {
    entry->u64(sections[kStrings].size());
    entry->u32(static_cast<uint32_t>(value.size()));
    sections[kStrings].raw(value);
  }

  void item(const Item& item) {
    base::ByteWriter& out = sections[kItems];
    name(item.fqn, &out);
    out.u8(item.is_tensor ? kItemTensor : kItemBytes);
    out.u8(static_cast<uint8_t>(item.tensor.dtype));
    out.u8(static_cast<uint8_t>(item.tensor.sizes.size()));
    out.u8(item.tensor.memory_format);
    out.u8(static_cast<uint8_t>((item.tensor.requires_grad ? kFlagRequiresGrad : 0) |
                                (item.tensor.pin_memory ? kFlagPinMemory : 0)));
    out.zeros(3);
    out.u32(item.ordinal);
    out.u64(sections[kDims].size() / 8);
    out.u64(sections[kChunks].size() / kEntryBytes);
    out.u32(static_cast<uint32_t>(item.chunks.size()));
    out.u32(0);
    append_dims(item.tensor.sizes, &sections[kDims]);
    for (const Chunk& c : item.chunks) chunk(c);
  }

  void chunk(const Chunk& chunk) {
    base::ByteWriter& out = sections[kChunks];
    out.u64(sections[kDims].size() / 8);
    out.u32(chunk.record.file);
    out.u8(static_cast<uint8_t>(chunk.record.kind));
    out.u8(static_cast<uint8_t>(chunk.record.stored_dtype));
    out.u16(0);
    out.i64(chunk.record.offset);
    out.i64(chunk.record.bytes);
    out.i64(chunk.record.data_offset);
    out.i64(chunk.record.data_bytes);
    append_dims(chunk.box.offsets, &sections[kDims]);
    append_dims(chunk.box.sizes, &sections[kDims]);
  }

  void file(const FileEntry& file) {
    base::ByteWriter& out = sections[kFiles];
    name(file.name, &out);
    out.u32(file.id.rank);
    out.u32(file.id.number);
    out.u32(file.trailer_crc);
    out.i64(file.bytes);
    out.id(file.id.file_id);
  }
};

/// Reads and checks one encoded manifest. The first fault found is kept in `fault`.
class Decoder {
 public:
  Decoder(const std::array<std::string_view, kCount>& sections, Manifest* out) : sections_(sections), out_(out) {}

  bool decode_files() {
    const std::string_view section = sections_[kFiles];
    if (section.size() % kEntryBytes != 0) return fail("files: odd length");
    base::ByteReader in(section);
    while (in.remaining() != 0) {
      FileEntry& file = out_->files.emplace_back();
      if (!name(&in, &file.name, nullptr)) return false;
      file.id.rank = in.u32();
      file.id.number = in.u32();
      file.trailer_crc = in.u32();
      file.bytes = in.i64();
      file.id.file_id = in.id();
      // The name is derived, and so can name no file outside the directory.
      if (file.name != data_file_name(file.id)) return fail(text("file '", file.name, "': not the name of its id"));
      if (file.bytes < kHeaderBytes + kDataTrailerBytes) return fail(text("file '", file.name, "': impossible size"));
    }
    return true;
  }

  bool decode_items() {
    const std::string_view section = sections_[kItems];
    if (section.size() % kEntryBytes != 0) return fail("items: odd length");
    if (sections_[kDims].size() % 8 != 0 || sections_[kChunks].size() % kEntryBytes != 0) return fail("odd length");
    base::ByteReader in(section);
    out_->items.reserve(section.size() / kEntryBytes);
    while (in.remaining() != 0) {
      if (!item(&in, &out_->items.emplace_back())) return false;
    }
    if (next_chunk_ != sections_[kChunks].size() / kEntryBytes) return fail("chunks: some belong to no item");
    std::vector<bool> taken(out_->items.size());
    for (const Item& item : out_->items) {
      if (item.ordinal >= taken.size() || taken[item.ordinal]) return fail("items: positions are no permutation");
      taken[item.ordinal] = true;
    }
    return true;
  }

  const std::string& fault() const { return fault_; }

 private:
  bool fail(std::string fault) {
    fault_ = std::move(fault);
    return false;
  }

  bool name(base::ByteReader* in, std::string* out, uint64_t* next_name) {
    const uint64_t offset = in->u64();
    const uint32_t size = in->u32();
    const std::string_view strings = sections_[kStrings];
    if (offset > strings.size() || size > strings.size() - offset) return fail("name: outside the string table");
    // Items have the table to themselves, one after the other: shared names could be made to fill the memory.
    if (next_name != nullptr && std::exchange(*next_name, offset + size) != offset) return fail("name: out of order");
    *out = std::string(strings.substr(offset, size));
    return base::is_utf8(*out) || fail("name: not UTF-8");
  }

  bool dims(uint64_t index, size_t count, tensor::Dims* out) {
    const std::string_view section = sections_[kDims];
    if (index != next_dim_ || count > section.size() / 8 - index) return fail("dims: outside their section");
    next_dim_ += count;
    out->resize(count);
    if (count != 0) std::memcpy(out->data(), section.data() + 8 * index, 8 * count);
    return true;
  }

  bool item(base::ByteReader* in, Item* item) {
    if (!name(in, &item->fqn, &next_name_)) return false;
    const uint8_t kind = in->u8();
    const uint8_t dtype = in->u8();
    const uint8_t num_dims = in->u8();
    item->tensor.memory_format = in->u8();
    const uint8_t flags = in->u8();
    in->skip(3);
    item->ordinal = in->u32();
    const uint64_t dims_index = in->u64();
    const uint64_t first_chunk = in->u64();
    const uint32_t num_chunks = in->u32();
    in->skip(4);
    const std::string where = text("item '", item->fqn, "': ");
    if (out_->items.size() > 1 && out_->items[out_->items.size() - 2].fqn >= item->fqn) {
      return fail(where + "out of order");
    }
    item->is_tensor = kind == kItemTensor;
    item->tensor.requires_grad = (flags & kFlagRequiresGrad) != 0;
    item->tensor.pin_memory = (flags & kFlagPinMemory) != 0;
    if (item->is_tensor) {
      if (tensor::find_dtype(dtype) == nullptr || item->tensor.memory_format > 2) return fail(where + "unknown dtype");
      item->tensor.dtype = static_cast<tensor::DType>(dtype);
    } else if (kind != kItemBytes || num_dims != 0 || num_chunks != 1) {
      return fail(where + "unknown kind");
    }
    int64_t numel;
    if (!dims(dims_index, num_dims, &item->tensor.sizes)) return false;
    if (!tensor::checked_numel(item->tensor.sizes, &numel)) return fail(where + "impossible shape");
    const std::string_view chunks = sections_[kChunks];
    // Chunks stand in the order of their items, each belonging to one.
    if (first_chunk != next_chunk_ || num_chunks > chunks.size() / kEntryBytes - next_chunk_) {
      return fail(where + "chunks outside their section");
    }
    item->chunks.resize(num_chunks);
    for (Chunk& c : item->chunks) {
      base::ByteReader entry(chunks.substr(kEntryBytes * next_chunk_++, kEntryBytes));
      if (!chunk(&entry, *item, &c)) return fail(where + fault_);
    }
    return true;
  }

  bool chunk(base::ByteReader* in, const Item& item, Chunk* chunk) {
    const uint64_t dims_index = in->u64();
    Record& record = chunk->record;
    record.file = in->u32();
    const uint8_t kind = in->u8();
    const uint8_t dtype = in->u8();
    in->skip(2);
    record.offset = in->i64();
    record.bytes = in->i64();
    record.data_offset = in->i64();
    record.data_bytes = in->i64();
    const size_t num_dims = item.tensor.sizes.size();
    if (!dims(dims_index, num_dims, &chunk->box.offsets)) return false;
    if (!dims(dims_index + num_dims, num_dims, &chunk->box.sizes)) return false;
    if (!tensor::is_inside(chunk->box, item.tensor.sizes)) {
      return fail(text("chunk at ", tensor::to_text(chunk->box.offsets), " of ", tensor::to_text(chunk->box.sizes),
                       " outside shape ", tensor::to_text(item.tensor.sizes)));
    }
    record.kind = static_cast<RecordKind>(kind);
    const bool bytes_record = record.kind == RecordKind::kBytes;
    if (kind < 1 || kind > 3 || bytes_record == item.is_tensor) return fail("record of another kind");
    if (record.file >= out_->files.size()) return fail("record in a file that is not listed");
    const int64_t file_bytes = out_->files[record.file].bytes;
    int64_t end;
    if (!base::checked_add(record.offset, record.bytes, &end) || record.offset < kHeaderBytes || end > file_bytes) {
      return fail("record outside its file");
    }
    return record.kind != RecordKind::kTensor || tensor_record(dtype, end, chunk);
  }

  bool tensor_record(uint8_t dtype, int64_t record_end, Chunk* chunk) {
    Record& record = chunk->record;
    const tensor::DTypeInfo* info = tensor::find_plain_dtype(dtype);
    if (info == nullptr) return fail("record of unknown dtype");
    record.stored_dtype = info->dtype;
    int64_t wanted, data_end;
    if (!tensor::checked_numel(chunk->box.sizes, &wanted) ||
        !base::checked_mul(wanted, info->itemsize_bytes, &wanted) || wanted != record.data_bytes ||
        !base::checked_add(record.data_offset, record.data_bytes, &data_end) || record.data_offset < record.offset ||
        record.data_offset % 64 != 0 || data_end > record_end) {
      return fail("data outside its record, or of another length than its shape");
    }
    return true;
  }

  const std::array<std::string_view, kCount>& sections_;
  Manifest* out_;
  uint64_t next_chunk_ = 0;
  uint64_t next_dim_ = 0;
  uint64_t next_name_ = 0;
  std::string fault_;
};

}  // namespace

const Item* Manifest::find(std::string_view fqn) const {
  const auto found = std::lower_bound(items.begin(), items.end(), fqn,
                                      [](const Item& item, std::string_view key) { return item.fqn < key; });
  return found != items.end() && found->fqn == fqn ? &*found : nullptr;
}

std::string encode_manifest(const Manifest& manifest) {
  Encoder encoder;
  for (const Item& item : manifest.items) encoder.item(item);
  for (const FileEntry& file : manifest.files) encoder.file(file);
  encode_tree(manifest.planner_data, &encoder.sections[kPlannerData]);
  encoder.sections[kUserMetadata].raw(manifest.user_metadata);
  encoder.sections[kCheckpointId].raw(manifest.checkpoint_id);

  base::ByteWriter out;
  out.raw(kMagic);
  out.u32(kFormatVersion);
  out.u32(kCount);
  out.id(manifest.save_id);
  out.zeros(kDirectoryBytes);
  for (size_t s = 0; s < kCount; ++s) {
    out.align(8);
    out.put_u64(kHeadBytes - kDirectoryBytes + 16 * s, out.size());
    out.put_u64(kHeadBytes - kDirectoryBytes + 16 * s + 8, encoder.sections[s].size());
    out.raw(encoder.sections[s].bytes());
  }
  return out.take();
}

base::Result<Manifest> decode_manifest(std::string_view bytes) {
  base::ByteReader in(bytes);
  const std::string_view magic = in.view(kMagic.size());
  const uint32_t version = in.u32();
  const uint32_t num_sections = in.u32();
  Manifest manifest;
  manifest.save_id = in.id();
  if (!in.ok() || magic != kMagic) return Status::make(Code::kCorrupt, "manifest: no magic");
  BCP_RETURN_IF_ERROR(check_version("manifest", version));
  if (num_sections != kCount) return Status::make(Code::kCorrupt, "manifest: wrong section count");
  std::array<std::string_view, kCount> sections;
  for (std::string_view& section : sections) {
    const uint64_t offset = in.u64();
    const uint64_t size = in.u64();
    if (!in.ok() || offset > bytes.size() || size > bytes.size() - offset) {
      return Status::make(Code::kCorrupt, "manifest: section outside the manifest");
    }
    section = bytes.substr(offset, size);
  }
  Decoder decoder(sections, &manifest);
  if (!decoder.decode_files() || !decoder.decode_items()) {
    return Status::make(Code::kCorrupt, text("manifest: ", decoder.fault()));
  }
  BCP_ASSIGN_OR_RETURN(manifest.planner_data, decode_tree(sections[kPlannerData]));
  manifest.user_metadata = std::string(sections[kUserMetadata]);
  manifest.checkpoint_id = std::string(sections[kCheckpointId]);
  if (!base::is_utf8(manifest.user_metadata) || !base::is_utf8(manifest.checkpoint_id)) {
    return Status::make(Code::kCorrupt, "manifest: text that is not UTF-8");
  }
  return manifest;
}

}  // namespace bytecheckpoint::format
