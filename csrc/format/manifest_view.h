// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "csrc/base/status.h"
#include "csrc/format/manifest_blocks.h"
#include "csrc/format/manifest_rows.h"

namespace bytecheckpoint::format {

/// An item without its chunks, and where those stand in the manifest.
struct FoundItem {
  Item item;
  uint64_t first_dim = 0;  // of the first chunk's box
  uint64_t first_chunk = 0;
  uint32_t num_chunks = 0;
};

/// Looks up single items, chunks and files of a manifest that is too large to be read by every rank.
///
/// What is handed out is as valid as from `decode_manifest`: names, boxes, records and files are checked one by one.
/// What takes a look at the whole is not checked: that names ascend, that rows share nothing, that positions are a
/// permutation. Where names do not ascend, some are not found. Not thread-safe; a failure leaves it usable.
class ManifestView {
 public:
  /// \returns kNotFound without a trailer of ours; kCorrupt, kVersion; what `read` fails with.
  static base::Result<ManifestView> open(int64_t file_bytes, ReadInto read);

  const base::Id& save_id() const { return head_.save_id; }
  uint64_t num_items() const { return head_.sections[kItems].bytes / kRowBytes; }
  uint64_t num_files() const { return head_.sections[kFiles].bytes / kRowBytes; }
  int64_t num_blocks() const { return blocks_.trailer().num_blocks; }
  int64_t num_blocks_read() const { return blocks_.num_blocks_read(); }

  /// Binary search; nothing if there is no such item.
  base::Result<std::optional<FoundItem>> find_item(std::string_view fqn);
  /// Of all items, in their order.
  base::Result<std::vector<std::string>> read_names();

  /// An item with the boxes of all its chunks, but without their records.
  /// \param number  In the order of the manifest, < num_items().
  base::Result<Item> read_boxes(uint64_t number);

  /// \param number  Of the chunk in its item, < found.num_chunks.
  base::Result<Chunk> read_chunk(const FoundItem& found, uint32_t number);

  /// Numbers of all chunks that share elements with `box`, ascending.
  ///
  /// Where chunks stand in the order of their offsets, as nearly always, these are found by searching, and that is
  /// taken if they cover the box, each element once. Otherwise all chunks of the item are looked at. Of chunks that
  /// overlap each other, which no save writes, some may be left out where the rest covers the box.
  /// \returns kInvalidArgument for a box outside the tensor.
  base::Result<std::vector<uint32_t>> find_overlapping(const FoundItem& found, const tensor::Box& box);
  /// These chunks.
  base::Result<std::vector<Chunk>> read_overlapping(const FoundItem& found, const tensor::Box& box);

  /// \param number  As in the records.
  base::Result<FileEntry> read_file(uint32_t number);
  base::Result<std::string> read_checkpoint_id() { return read_text(kCheckpointId); }
  base::Result<std::string> read_user_metadata() { return read_text(kUserMetadata); }

 private:
  /// Chunks that share elements with one box.
  struct Overlap {
    std::vector<uint32_t> chunks;  // numbers
    int64_t num_elements = 0;      // of the box that they have, counted once for each
  };

  explicit ManifestView(ManifestBlocks blocks) : blocks_(std::move(blocks)) {}

  base::Status copy(Section section, uint64_t offset, uint64_t size, void* into);
  template <class Row>
  base::Result<Row> read_row(Section section, uint64_t number);
  base::Result<std::string> read_name(uint64_t offset, uint32_t size);
  base::Result<std::string> read_text(Section section);
  base::Result<FoundItem> read_item(const ItemRow& row, std::string fqn);
  base::Result<tensor::Box> read_box(const FoundItem& found, uint32_t number);
  base::Status add_if_overlapping(const FoundItem& found, uint32_t number, const tensor::Box& box, Overlap* overlap);
  base::Result<Overlap> search(const FoundItem& found, const tensor::Box& box, int64_t num_elements);
  base::Result<Overlap> scan(const FoundItem& found, const tensor::Box& box);

  ManifestBlocks blocks_;
  ManifestHead head_;
};

}  // namespace bytecheckpoint::format
