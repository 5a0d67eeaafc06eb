// SPDX-License-Identifier: Apache-2.0
#include "csrc/format/manifest/manifest_view.h"

#include <cstring>

#include "tests/fuzz/peak_memory.h"
#include "tests/fuzz/targets.h"
#include "tests/fuzz/valid_manifest.h"

namespace bytecheckpoint::fuzz {
namespace {

using namespace format;  // NOLINT

/// Names that items may have, whether the items are damaged or not.
std::vector<std::string> names_in(std::string_view manifest) {
  std::vector<std::string> names = {"", "layer.weight"};
  const auto head = decode_manifest_head(manifest, manifest.size());
  if (!head.is_ok()) return names;
  const ManifestHead::Range &items = head.value().sections[kItems], &strings = head.value().sections[kStrings];
  for (size_t at = 0; at < items.bytes && names.size() < 64; at += kRowBytes) {
    ItemRow row;
    std::memcpy(&row, manifest.data() + items.offset + at, sizeof row);
    if (row.name_offset > strings.bytes || row.name_bytes > strings.bytes - row.name_offset) continue;
    names.emplace_back(manifest.substr(strings.offset + row.name_offset, row.name_bytes));
  }
  return names;
}

bool same(const Chunk& a, const Chunk& b) {
  return a.box == b.box && a.record.kind == b.record.kind && a.record.file == b.record.file &&
         a.record.offset == b.record.offset && a.record.bytes == b.record.bytes &&
         a.record.data_offset == b.record.data_offset && a.record.data_bytes == b.record.data_bytes;
}

/// What one look-up returns is valid. If the whole manifest can be decoded, it also matches that manifest.
std::string check_item(ManifestView* view, const std::string& name, const Manifest* whole) {
  const auto found = view->find_item(name);
  const Item* item = whole == nullptr ? nullptr : whole->find(name);
  if (whole != nullptr) BCP_HOLDS(found.is_ok() && found.value().has_value() == (item != nullptr));
  if (!found.is_ok() || !found.value().has_value()) return {};
  const FoundItem& in_view = *found.value();
  BCP_HOLDS(item == nullptr ||
            (in_view.num_chunks == item->chunks.size() && item->tensor.sizes == in_view.item.tensor.sizes));
  for (uint32_t c = 0; c < in_view.num_chunks; ++c) {
    const auto chunk = view->read_chunk(in_view, c);
    BCP_HOLDS(item == nullptr || (chunk.is_ok() && same(chunk.value(), item->chunks[c])));
    if (!chunk.is_ok()) continue;
    BCP_HOLDS(tensor::is_inside(chunk.value().box, in_view.item.tensor.sizes));
    BCP_HOLDS(chunk.value().record.file < view->num_files());
    const auto file = view->read_file(chunk.value().record.file);
    BCP_HOLDS(whole == nullptr || file.is_ok());
  }
  tensor::Box box = tensor::whole(in_view.item.tensor.sizes);
  for (int64_t& size : box.sizes) size -= size / 2;
  const auto overlapping = view->read_overlapping(in_view, box);
  BCP_HOLDS(item == nullptr || overlapping.is_ok());
  return {};
}

std::string check_view(std::string_view bytes, const Manifest* whole) {
  const ReadInto read = [bytes](int64_t offset, int64_t size, char* into) {
    if (offset < 0 || size < 0 || static_cast<uint64_t>(offset) > bytes.size() ||
        static_cast<uint64_t>(size) > bytes.size() - static_cast<uint64_t>(offset)) {
      return base::Status::make(base::Code::kInvalidArgument, "asked for what is not in the file");
    }
    if (size != 0) std::memcpy(into, bytes.data() + offset, static_cast<size_t>(size));
    return base::Status::ok();
  };
  auto view = ManifestView::open(static_cast<int64_t>(bytes.size()), read);
  BCP_HOLDS(whole == nullptr || view.is_ok());
  if (!view.is_ok()) {
    BCP_HOLDS(view.status().code() != base::Code::kInvalidArgument);
    return {};
  }
  (void)view.value().read_checkpoint_id();
  (void)view.value().read_user_metadata();
  const auto trailer =
      decode_metadata_trailer(bytes.substr(bytes.size() - kMetadataTrailerBytes), static_cast<int64_t>(bytes.size()));
  const std::string_view manifest = bytes.substr(static_cast<size_t>(trailer.value().pickle_bytes),
                                                 static_cast<size_t>(trailer.value().manifest_bytes));
  for (const std::string& name : names_in(manifest)) BCP_ALL_HOLD(check_item(&view.value(), name, whole));
  return {};
}

}  // namespace

std::string manifest_view(std::string_view bytes) {
  const auto whole = decode_metadata_file(bytes);
  PeakMemory memory(bytes.size());
  BCP_ALL_HOLD(check_view(bytes, whole.is_ok() ? &whole.value() : nullptr));
  return memory.stop();
}

}  // namespace bytecheckpoint::fuzz
