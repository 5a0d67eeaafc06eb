// SPDX-License-Identifier: Apache-2.0
#include "csrc/format/manifest/manifest_view.h"

#include <algorithm>

#include "csrc/base/utf8.h"
#include "csrc/format/manifest/chunk_search.h"

namespace bytecheckpoint::format {
namespace {

using base::Code;
using base::Status;
using base::text;

/// The longest step that a search takes before it halves what is left.
constexpr uint64_t kLargestStep = 64;

Status corrupt(std::string_view what) {
  return Status::make(Code::kCorrupt, text("manifest: ", what));
}

}  // namespace

base::Result<ManifestView> ManifestView::open(int64_t file_bytes, ReadInto read) {
  BCP_ASSIGN_OR_RETURN(ManifestBlocks blocks, ManifestBlocks::open(file_bytes, std::move(read)));
  ManifestView view(std::move(blocks));
  std::string head(std::min<size_t>(kManifestHeadBytes, view.blocks_.num_bytes()), '\0');
  BCP_RETURN_IF_ERROR(view.blocks_.copy(0, head.size(), head.data()));
  BCP_ASSIGN_OR_RETURN(view.head_, decode_manifest_head(head, view.blocks_.num_bytes()));
  if (view.head_.save_id != view.blocks_.trailer().save_id) return corrupt("save id differs from the trailer's");
  return view;
}

Status ManifestView::copy(Section section, uint64_t offset, uint64_t size, void* into) {
  const ManifestHead::Range& range = head_.sections[section];
  if (offset > range.bytes || size > range.bytes - offset) return corrupt("a reference leads outside its section");
  return blocks_.copy(range.offset + offset, size, into);
}

template <class Row>
base::Result<Row> ManifestView::read_row(Section section, uint64_t number) {
  Row row;
  if (number >= head_.sections[section].bytes / kRowBytes)
    return corrupt("a reference leads to a row that does not exist");
  BCP_RETURN_IF_ERROR(copy(section, kRowBytes * number, kRowBytes, &row));
  return row;
}

Status ManifestView::copy_name(uint64_t offset, uint32_t size, std::string* name) {
  if (size > head_.sections[kStrings].bytes) return corrupt("name: outside the string table");
  name->resize(size);
  return copy(kStrings, offset, size, name->data());
}

base::Result<std::string> ManifestView::read_name(uint64_t offset, uint32_t size) {
  std::string name;
  BCP_RETURN_IF_ERROR(copy_name(offset, size, &name));
  if (!base::is_utf8(name)) return corrupt("name: not UTF-8");
  return name;
}

base::Result<std::string> ManifestView::read_text(Section section) {
  std::string all(head_.sections[section].bytes, '\0');
  BCP_RETURN_IF_ERROR(copy(section, 0, all.size(), all.data()));
  if (!base::is_utf8(all)) return corrupt("text: not UTF-8");
  return all;
}

base::Result<std::optional<FoundItem>> ManifestView::find_item(std::string_view fqn) {
  uint64_t low = 0, high = num_items();
  // Goes in growing steps away from the place where it begins, and halves what is left once they are large.
  uint64_t at = next_item_ < high ? next_item_ : 0, step = 1;
  std::string name;
  while (low < high) {
    BCP_ASSIGN_OR_RETURN(const ItemRow row, read_row<ItemRow>(kItems, at));
    BCP_RETURN_IF_ERROR(copy_name(row.name_offset, row.name_bytes, &name));
    if (name == fqn) {
      if (!base::is_utf8(name)) return corrupt("name: not UTF-8");
      next_item_ = at + 1;
      BCP_ASSIGN_OR_RETURN(FoundItem found, read_item(row, std::move(name)));
      return std::optional<FoundItem>(std::move(found));
    }
    const bool is_behind = name < fqn;
    (is_behind ? low : high) = is_behind ? at + 1 : at;
    if (step > kLargestStep || step >= high - low) {
      at = low + (high - low) / 2;
    } else {
      at = is_behind ? low + step - 1 : high - step;
    }
    if (step <= kLargestStep) step *= 2;
  }
  return std::optional<FoundItem>();
}

base::Result<std::vector<std::string>> ManifestView::read_names() {
  std::vector<std::string> names;
  for (uint64_t number = 0; number < num_items(); ++number) {
    BCP_ASSIGN_OR_RETURN(const ItemRow row, read_row<ItemRow>(kItems, number));
    BCP_ASSIGN_OR_RETURN(std::string name, read_name(row.name_offset, row.name_bytes));
    names.push_back(std::move(name));
  }
  return names;
}

base::Result<Item> ManifestView::read_boxes(uint64_t number) {
  BCP_ASSIGN_OR_RETURN(const ItemRow row, read_row<ItemRow>(kItems, number));
  BCP_ASSIGN_OR_RETURN(std::string name, read_name(row.name_offset, row.name_bytes));
  BCP_ASSIGN_OR_RETURN(FoundItem found, read_item(row, std::move(name)));
  Item item = found.item;
  for (uint32_t c = 0; c < found.num_chunks; ++c) {
    BCP_ASSIGN_OR_RETURN(tensor::Box box, read_box(found, c));
    item.chunks.push_back({std::move(box), {}});
  }
  return item;
}

base::Result<FoundItem> ManifestView::read_item(const ItemRow& row, std::string fqn) {
  FoundItem found;
  found.item.fqn = std::move(fqn);
  const std::string where = text("item '", found.item.fqn, "': ");
  const uint64_t all_dims = head_.sections[kDims].bytes / 8;
  const uint64_t all_chunks = head_.sections[kChunks].bytes / kRowBytes;
  const uint64_t num_dims = row.num_dims * (1 + 2 * uint64_t{row.num_chunks});
  if (row.first_dim > all_dims || num_dims > all_dims - row.first_dim)
    return corrupt(where + "dims outside their section");
  if (row.first_chunk > all_chunks || row.num_chunks > all_chunks - row.first_chunk) {
    return corrupt(where + "chunks outside their section");
  }
  if (row.ordinal >= num_items()) return corrupt(where + "impossible position");
  found.first_dim = row.first_dim + row.num_dims;
  found.first_chunk = row.first_chunk;
  found.num_chunks = row.num_chunks;
  tensor::Dims& sizes = found.item.tensor.sizes;
  sizes.resize(row.num_dims);
  BCP_RETURN_IF_ERROR(copy(kDims, 8 * row.first_dim, 8 * sizes.size(), sizes.data()));
  std::string fault;
  if (!unpack_item(row, head_.version, &found.item, &fault)) return corrupt(where + fault);
  return found;
}

base::Result<tensor::Box> ManifestView::read_box(const FoundItem& found, uint32_t number) {
  const tensor::Dims& sizes = found.item.tensor.sizes;
  tensor::Box box{tensor::Dims(sizes.size()), tensor::Dims(sizes.size())};
  const uint64_t bytes = 8 * sizes.size();
  const uint64_t offset = 8 * found.first_dim + 2 * bytes * number;
  BCP_RETURN_IF_ERROR(copy(kDims, offset, bytes, box.offsets.data()));
  BCP_RETURN_IF_ERROR(copy(kDims, offset + bytes, bytes, box.sizes.data()));
  if (!tensor::is_inside(box, sizes)) {
    return corrupt(text("item '", found.item.fqn, "': chunk at ", tensor::to_text(box.offsets), " of ",
                        tensor::to_text(box.sizes), " outside shape ", tensor::to_text(sizes)));
  }
  return box;
}

base::Result<Chunk> ManifestView::read_chunk(const FoundItem& found, uint32_t number) {
  if (number >= found.num_chunks) {
    return Status::make(Code::kInvalidArgument,
                        text("'", found.item.fqn, "': chunk ", number, " of ", found.num_chunks));
  }
  BCP_ASSIGN_OR_RETURN(tensor::Box box, read_box(found, number));
  const std::string where = text("item '", found.item.fqn, "': ");
  BCP_ASSIGN_OR_RETURN(const ChunkRow row, read_row<ChunkRow>(kChunks, found.first_chunk + number));
  // The boxes of an item stand without gaps, so their place is known without the row.
  if (row.first_dim != found.first_dim + 2 * box.num_dims() * number) return corrupt(where + "dims out of order");
  if (row.file >= num_files()) return corrupt(where + "a record is in a file that is not listed");
  BCP_ASSIGN_OR_RETURN(const FileRow file, read_row<FileRow>(kFiles, row.file));
  Chunk chunk;
  chunk.box = std::move(box);
  std::string fault;
  if (!unpack_chunk(row, found.item, file.bytes, &chunk, &fault)) return corrupt(where + fault);
  return chunk;
}

base::Result<std::vector<uint32_t>> ManifestView::find_overlapping(const FoundItem& found, const tensor::Box& box) {
  int64_t num_elements = 0;
  if (!tensor::is_inside(box, found.item.tensor.sizes) || !tensor::checked_numel(box.sizes, &num_elements)) {
    return Status::make(Code::kInvalidArgument, text("'", found.item.fqn, "': ", tensor::to_text(box.sizes), " at ",
                                                     tensor::to_text(box.offsets), " is outside shape ",
                                                     tensor::to_text(found.item.tensor.sizes)));
  }
  if (num_elements == 0) return std::vector<uint32_t>();
  BCP_ASSIGN_OR_RETURN(Overlap overlap, search(found, box, num_elements));
  if (overlap.num_elements != num_elements) {
    BCP_ASSIGN_OR_RETURN(overlap, scan(found, box));
  }
  std::sort(overlap.chunks.begin(), overlap.chunks.end());
  return std::move(overlap.chunks);
}

base::Result<std::vector<Chunk>> ManifestView::read_overlapping(const FoundItem& found, const tensor::Box& box) {
  BCP_ASSIGN_OR_RETURN(const std::vector<uint32_t> numbers, find_overlapping(found, box));
  std::vector<Chunk> chunks;
  for (const uint32_t number : numbers) {
    BCP_ASSIGN_OR_RETURN(Chunk chunk, read_chunk(found, number));
    chunks.push_back(std::move(chunk));
  }
  return chunks;
}

Status ManifestView::add_if_overlapping(const FoundItem& found, uint32_t number, const tensor::Box& box,
                                        Overlap* overlap) {
  BCP_ASSIGN_OR_RETURN(const tensor::Box chunk_box, read_box(found, number));
  tensor::Box common;
  int64_t num_elements;
  if (!tensor::intersect(box, chunk_box, &common) || !tensor::checked_numel(common.sizes, &num_elements)) {
    return Status::ok();
  }
  overlap->chunks.push_back(number);
  // Chunks that overlap one another may have more elements than int64 can count. The sum is then not the number wanted
  // either.
  if (!base::checked_add(overlap->num_elements, num_elements, &overlap->num_elements))
    overlap->num_elements = INT64_MAX;
  return Status::ok();
}

base::Result<ManifestView::Overlap> ManifestView::search(const FoundItem& found, const tensor::Box& box,
                                                         int64_t num_elements) {
  Status status;
  const uint64_t num_dims = box.num_dims();
  const OffsetOf offset_of = [&](uint32_t chunk, size_t dim) {
    int64_t offset = 0;
    if (status.is_ok()) status = copy(kDims, 8 * (found.first_dim + 2 * num_dims * chunk + dim), 8, &offset);
    return offset;
  };
  Overlap overlap;
  const std::vector<uint32_t> numbers = search_overlapping(found.item.tensor.sizes, box, found.num_chunks, offset_of);
  BCP_RETURN_IF_ERROR(status);
  for (uint32_t number : numbers) {
    BCP_RETURN_IF_ERROR(add_if_overlapping(found, number, box, &overlap));
    if (overlap.num_elements > num_elements) break;
  }
  return overlap;
}

base::Result<ManifestView::Overlap> ManifestView::scan(const FoundItem& found, const tensor::Box& box) {
  Overlap overlap;
  for (uint32_t number = 0; number < found.num_chunks; ++number) {
    BCP_RETURN_IF_ERROR(add_if_overlapping(found, number, box, &overlap));
  }
  return overlap;
}

base::Result<FileEntry> ManifestView::read_file(uint32_t number) {
  BCP_ASSIGN_OR_RETURN(const FileRow row, read_row<FileRow>(kFiles, number));
  FileEntry file;
  BCP_ASSIGN_OR_RETURN(file.name, read_name(row.name_offset, row.name_bytes));
  std::string fault;
  if (!unpack_file(row, &file, &fault)) return corrupt(fault);
  return file;
}

}  // namespace bytecheckpoint::format
