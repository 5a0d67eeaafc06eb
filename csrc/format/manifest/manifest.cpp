// SPDX-License-Identifier: Apache-2.0
#include "csrc/format/manifest/manifest.h"

#include <algorithm>
#include <array>
#include <cstring>

#include "csrc/base/utf8.h"
#include "csrc/format/manifest/manifest_rows.h"

namespace bytecheckpoint::format {
namespace {

using base::Code;
using base::Status;
using base::text;

/// Decodes and checks the parts of one manifest. Keeps the first fault that it finds.
class Decoder {
 public:
  Decoder(uint32_t version, const std::array<std::string_view, kNumSections>& sections, Manifest* out)
      : version_(version), sections_(sections), out_(out) {}

  bool decode_files() {
    out_->files.resize(sections_[kFiles].size() / kRowBytes);
    for (size_t f = 0; f < out_->files.size(); ++f) {
      const auto row = row_of<FileRow>(kFiles, f);
      FileEntry& file = out_->files[f];
      if (!name(row.name_offset, row.name_bytes, &file.name, nullptr) || !unpack_file(row, &file, &fault_))
        return false;
    }
    return true;
  }

  bool decode_items() {
    const size_t num_items = sections_[kItems].size() / kRowBytes;
    out_->items.reserve(num_items);
    for (size_t i = 0; i < num_items; ++i) {
      if (!item(row_of<ItemRow>(kItems, i), &out_->items.emplace_back())) return false;
    }
    if (next_chunk_ != num_chunk_rows()) return fail("chunks: some belong to no item");
    std::vector<bool> taken(num_items);
    for (const Item& item : out_->items) {
      if (item.ordinal >= taken.size() || taken[item.ordinal])
        return fail("items: the positions are not a permutation");
      taken[item.ordinal] = true;
    }
    return true;
  }

  const std::string& fault() const { return fault_; }

 private:
  template <class Row>
  Row row_of(Section section, size_t index) const {
    Row row;
    std::memcpy(&row, sections_[section].data() + kRowBytes * index, sizeof row);
    return row;
  }

  uint64_t num_chunk_rows() const { return sections_[kChunks].size() / kRowBytes; }

  bool fail(std::string fault) {
    fault_ = std::move(fault);
    return false;
  }

  bool name(uint64_t offset, uint32_t size, std::string* out, uint64_t* next_name) {
    const std::string_view strings = sections_[kStrings];
    if (offset > strings.size() || size > strings.size() - offset) return fail("name: outside the string table");
    // The names of items fill the table one after the other. If names could be shared, a small manifest could fill our
    // memory.
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

  bool item(const ItemRow& row, Item* item) {
    if (!name(row.name_offset, row.name_bytes, &item->fqn, &next_name_)) return false;
    const std::string where = text("item '", item->fqn, "': ");
    if (out_->items.size() > 1 && out_->items[out_->items.size() - 2].fqn >= item->fqn) {
      return fail(where + "out of order");
    }
    if (!dims(row.first_dim, row.num_dims, &item->tensor.sizes)) return false;
    if (!unpack_item(row, version_, item, &fault_)) return fail(where + fault_);
    // The chunks stand in the order of their items, and each belongs to one item.
    if (row.first_chunk != next_chunk_ || row.num_chunks > num_chunk_rows() - next_chunk_) {
      return fail(where + "chunks outside their section");
    }
    item->chunks.resize(row.num_chunks);
    for (Chunk& c : item->chunks) {
      if (!chunk(row_of<ChunkRow>(kChunks, next_chunk_++), *item, &c)) return fail(where + fault_);
    }
    return true;
  }

  bool chunk(const ChunkRow& row, const Item& item, Chunk* chunk) {
    const size_t num_dims = item.tensor.sizes.size();
    if (!dims(row.first_dim, num_dims, &chunk->box.offsets)) return false;
    if (!dims(row.first_dim + num_dims, num_dims, &chunk->box.sizes)) return false;
    if (row.file >= out_->files.size()) return fail("a record is in a file that is not listed");
    return unpack_chunk(row, item, out_->files[row.file].bytes, chunk, &fault_);
  }

  const uint32_t version_;
  const std::array<std::string_view, kNumSections>& sections_;
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

base::Result<Manifest> decode_manifest(std::string_view bytes) {
  BCP_ASSIGN_OR_RETURN(const ManifestHead head, decode_manifest_head(bytes, bytes.size()));
  std::array<std::string_view, kNumSections> sections;
  for (size_t s = 0; s < kNumSections; ++s) sections[s] = bytes.substr(head.sections[s].offset, head.sections[s].bytes);
  Manifest manifest;
  manifest.save_id = head.save_id;
  Decoder decoder(head.version, sections, &manifest);
  if (!decoder.decode_files() || !decoder.decode_items()) {
    return Status::make(Code::kCorrupt, text("manifest: ", decoder.fault()));
  }
  BCP_ASSIGN_OR_RETURN(manifest.planner_data, decode_tree(sections[kPlannerData]));
  manifest.user_metadata = std::string(sections[kUserMetadata]);
  manifest.checkpoint_id = std::string(sections[kCheckpointId]);
  if (!base::is_utf8(manifest.user_metadata) || !base::is_utf8(manifest.checkpoint_id)) {
    return Status::make(Code::kCorrupt, "manifest: a text is not UTF-8");
  }
  return manifest;
}

}  // namespace bytecheckpoint::format
