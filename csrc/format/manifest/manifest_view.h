// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "csrc/base/status.h"
#include "csrc/format/manifest/manifest_blocks.h"
#include "csrc/format/manifest/manifest_rows.h"

namespace bytecheckpoint::format {

/// An item without its chunks, and where these stand in the manifest.
struct FoundItem {
  Item item;
  uint64_t first_dim = 0;  // index of the first chunk's box in the dims
  uint64_t first_chunk = 0;
  uint32_t num_chunks = 0;
};

/// Looks up single items, chunks and files of a manifest that is too large for every rank to read.
///
/// What it returns is checked as by `decode_manifest`: names, boxes, records and files, one by one. It does not check
/// what would need the whole manifest: that names ascend, that rows share nothing, that positions in the state dict are
/// unique. If names do not ascend, some items are not found.
/// Not thread-safe. After a failure the object can still be used.
class ManifestView {
 public:
  /// Reads the trailer, the block table and the head of the manifest.
  /// \param file_bytes  Size of the metadata file.
  /// \returns kNotFound if the file has no trailer of ours; kCorrupt, kVersion; what `read` fails with.
  static base::Result<ManifestView> open(int64_t file_bytes, ReadInto read);

  const base::Id& save_id() const { return head_.save_id; }
  uint64_t num_items() const { return head_.sections[kItems].bytes / kRowBytes; }
  uint64_t num_files() const { return head_.sections[kFiles].bytes / kRowBytes; }
  int64_t num_blocks() const { return blocks_.trailer().num_blocks; }
  int64_t num_blocks_read() const { return blocks_.num_blocks_read(); }
  /// Reads all blocks of the manifest and checks their CRCs, nothing else. \returns kCorrupt; what `read` fails with.
  base::Status check_blocks() { return blocks_.check_all(); }

  /// Finds an item by a search that begins at the item behind the one found last: those that a load asks for one after
  /// another are mostly neighbours. \returns nothing if there is none of this name.
  base::Result<std::optional<FoundItem>> find_item(std::string_view fqn);
  /// Reads the names of all items, in the order of the manifest.
  base::Result<std::vector<std::string>> read_names();

  /// Reads an item with the boxes of all its chunks, but without their records.
  /// \param number  Position of the item in the manifest, < num_items().
  base::Result<Item> read_boxes(uint64_t number);

  /// Reads one chunk of an item.
  /// \param number  Number of the chunk in its item, < found.num_chunks.
  base::Result<Chunk> read_chunk(const FoundItem& found, uint32_t number);

  /// Returns the numbers of all chunks that share elements with `box`, ascending.
  ///
  /// Chunks nearly always stand in the order of their offsets. So a binary search comes first, and its result is used
  /// if it has each element of the box exactly once. Otherwise all chunks of the item are looked at. If chunks overlap
  /// one another, which no save writes, the result may lack some of them, but covers the box if they do.
  /// \returns kInvalidArgument for a box outside the tensor.
  base::Result<std::vector<uint32_t>> find_overlapping(const FoundItem& found, const tensor::Box& box);
  /// Reads the chunks that `find_overlapping` finds.
  base::Result<std::vector<Chunk>> read_overlapping(const FoundItem& found, const tensor::Box& box);

  /// Reads one entry of the list of files.
  /// \param number  As in `Record::file`.
  base::Result<FileEntry> read_file(uint32_t number);
  base::Result<std::string> read_checkpoint_id() { return read_text(kCheckpointId); }
  base::Result<std::string> read_user_metadata() { return read_text(kUserMetadata); }

 private:
  /// Chunks that share elements with one box.
  struct Overlap {
    std::vector<uint32_t> chunks;  // numbers
    int64_t num_elements = 0;      // elements of the box in these chunks; an element in two chunks counts twice
  };

  explicit ManifestView(ManifestBlocks blocks) : blocks_(std::move(blocks)) {}

  base::Status copy(Section section, uint64_t offset, uint64_t size, void* into);
  template <class Row>
  base::Result<Row> read_row(Section section, uint64_t number);
  base::Status copy_name(uint64_t offset, uint32_t size, std::string* name);
  base::Result<std::string> read_name(uint64_t offset, uint32_t size);
  base::Result<std::string> read_text(Section section);
  base::Result<FoundItem> read_item(const ItemRow& row, std::string fqn);
  base::Result<tensor::Box> read_box(const FoundItem& found, uint32_t number);
  base::Status add_if_overlapping(const FoundItem& found, uint32_t number, const tensor::Box& box, Overlap* overlap);
  base::Result<Overlap> search(const FoundItem& found, const tensor::Box& box, int64_t num_elements);
  base::Result<Overlap> scan(const FoundItem& found, const tensor::Box& box);

  ManifestBlocks blocks_;
  ManifestHead head_;
  uint64_t next_item_ = 0;  // behind the item that was found last
};

}  // namespace bytecheckpoint::format
