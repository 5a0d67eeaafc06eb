// SPDX-License-Identifier: Apache-2.0
#include "csrc/format/manifest/manifest_blocks.h"

#include <algorithm>
#include <cstring>

#include "csrc/base/crc32.h"

namespace bytecheckpoint::format {

using base::Code;
using base::Status;
using base::text;

base::Result<ManifestBlocks> ManifestBlocks::open(int64_t file_bytes, ReadInto read) {
  ManifestBlocks blocks;
  std::string tail(static_cast<size_t>(std::min(file_bytes, kMetadataTrailerBytes)), '\0');
  const auto tail_bytes = static_cast<int64_t>(tail.size());
  BCP_RETURN_IF_ERROR(read(file_bytes - tail_bytes, tail_bytes, tail.data()));
  BCP_ASSIGN_OR_RETURN(blocks.trailer_, decode_metadata_trailer(tail, file_bytes));
  const MetadataTrailer& trailer = blocks.trailer_;
  std::string table(static_cast<size_t>(4 * trailer.num_blocks), '\0');
  BCP_RETURN_IF_ERROR(read(trailer.table_offset(), 4 * trailer.num_blocks, table.data()));
  BCP_RETURN_IF_ERROR(check_table(trailer, table));
  blocks.crcs_ = decode_block_table(table);
  blocks.slot_of_block_.assign(blocks.crcs_.size(), -1);
  blocks.read_ = std::move(read);
  return blocks;
}

Status ManifestBlocks::copy(uint64_t offset, uint64_t size, void* into) {
  if (offset > num_bytes() || size > num_bytes() - offset) {
    return Status::make(Code::kCorrupt, text("manifest: ", size, " bytes at ", offset, " of ", num_bytes()));
  }
  for (auto* out = static_cast<char*>(into); size != 0;) {
    BCP_ASSIGN_OR_RETURN(const std::string_view bytes, block(static_cast<int64_t>(offset / kBlockBytes)));
    const uint64_t begin = offset % kBlockBytes;
    const uint64_t count = std::min<uint64_t>(size, bytes.size() - begin);
    std::memcpy(out, bytes.data() + begin, count);
    out += count;
    offset += count;
    size -= count;
  }
  return Status::ok();
}

Status ManifestBlocks::check_all() {
  Slot passing;
  for (int64_t number = 0; number < trailer_.num_blocks; ++number) BCP_RETURN_IF_ERROR(fill(number, &passing));
  return Status::ok();
}

base::Result<std::string_view> ManifestBlocks::block(int64_t number) {
  int32_t& known = slot_of_block_[static_cast<size_t>(number)];
  if (known < 0) {
    const size_t slot = free_slot();
    BCP_RETURN_IF_ERROR(fill(number, &slots_[slot]));
    known = static_cast<int32_t>(slot);
  }
  Slot& slot = slots_[static_cast<size_t>(known)];
  slot.last_use = ++num_uses_;
  return std::string_view(slot.bytes);
}

Status ManifestBlocks::fill(int64_t number, Slot* slot) {
  const int64_t begin = number * kBlockBytes;
  const int64_t size = std::min(kBlockBytes, trailer_.manifest_bytes - begin);
  slot->bytes.resize(static_cast<size_t>(size));
  BCP_RETURN_IF_ERROR(read_(trailer_.pickle_bytes + begin, size, slot->bytes.data()));
  ++num_blocks_read_;
  const uint32_t computed = base::crc32(0, slot->bytes.data(), slot->bytes.size());
  const uint32_t stored = crcs_[static_cast<size_t>(number)];
  if (computed != stored) return wrong_block(trailer_, number, computed, stored);
  slot->block = number;
  return Status::ok();
}

size_t ManifestBlocks::free_slot() {
  if (slots_.size() < kMaxSlots) {
    slots_.emplace_back();
    return slots_.size() - 1;
  }
  const auto oldest = std::min_element(slots_.begin(), slots_.end(),
                                       [](const Slot& a, const Slot& b) { return a.last_use < b.last_use; });
  if (oldest->block >= 0) slot_of_block_[static_cast<size_t>(oldest->block)] = -1;
  oldest->block = -1;
  return static_cast<size_t>(oldest - slots_.begin());
}

}  // namespace bytecheckpoint::format
