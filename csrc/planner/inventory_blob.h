// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "csrc/base/status.h"
#include "csrc/base/varint.h"
#include "csrc/planner/inventory.h"

namespace bytecheckpoint::planner {

/// Encodes an inventory as bytes, to be sent to another process of the same build.
///
/// The bytes depend only on the content: equal inventories have equal bytes, whatever they were merged from. So a
/// digest of the bytes can be the key of a cache. Pure; O(size of the inventory).
std::string encode_inventory(const Inventory& inventory);

/// Reads the bytes of `encode_inventory`, entry by entry. They may be damaged or hostile. Takes no more memory than a
/// small multiple of the bytes.
///
///     InventoryReader reader(&rank_sets);
///     BCP_RETURN_IF_ERROR(reader.begin(blob));
///     while (reader.next()) {
///       // reader.entry(), fqn(), path(), sizes()
///       for (uint32_t b = 0; b < reader.entry().num_boxes && reader.next_box(); ++b) {
///         // reader.box_dims(), box_holders()
///       }
///     }
///     BCP_RETURN_IF_ERROR(reader.end());
///
/// All that it returns is as InventoryBuilder would accept it: known dtypes, possible sizes, the boxes of an entry in
/// order, ranks within those of the inventory. It does not check that names are unique; the code that collects the
/// entries must do so.
///
/// One reader can read many blobs. It can remember the heads of entries, which are all but their boxes. Ranks have
/// mostly the same entries in the same order, so most heads equal those of the blob before, and one comparison of bytes
/// then saves their decoding.
/// Not thread-safe.
class InventoryReader {
 public:
  /// \param rank_sets  Receives the sets of ranks; must outlive the reader.
  /// \param remembers  Whether to remember the heads of a blob while the next one is read. Heads share parts of their
  /// names, so remembering those of a hostile blob may take 100 times its bytes.
  explicit InventoryReader(RankSets* rank_sets, bool remembers = false)
      : rank_sets_(rank_sets), remembers_(remembers) {}

  /// Reads the head of a blob. \returns kCorrupt if it is damaged. After a failure, or a blob that was not read to its
  /// end without one, the reader must not be used again.
  ///
  /// \param blob  Must outlive the reader if it remembers.
  /// \param as_rank  If given, the blob must be of one rank, and counts as the inventory of this rank, whatever rank it
  /// names: a rank may not know its number when it encodes.
  base::Status begin(std::string_view blob, std::optional<uint32_t> as_rank = std::nullopt);
  /// Reads the next entry. \returns false at the end and after damage; `end` tells which.
  bool next();
  /// Reads the next box of the entry; must be called `entry().num_boxes` times. \returns false after damage.
  ///
  /// \param words  If not null, receives the numbers of a kShard entry's box as `pack_numbers` stores them.
  bool next_box(uint32_t* words = nullptr, bool is_wide = false);
  /// Returns kCorrupt if anything was damaged or is left unread.
  base::Status end();

  RankSets::Id ranks() const { return sets_[0]; }
  size_t num_entries() const { return num_entries_; }
  /// The number of the current entry in its blob, counted from 0.
  size_t position() const { return position_; }
  /// Whether the entry at this position of the blob before was the same but for its boxes and its ranks. Only a reader
  /// that remembers says so.
  bool is_repeated() const { return is_repeated_; }
  /// The current entry. Its fields that say where its name, dims and holders are stored have no meaning.
  const Entry& entry() const { return heads_[remembers_ ? position_ : 0].entry; }
  std::string_view fqn() const { return std::string_view(text_).substr(entry().fqn_begin, entry().fqn_size); }
  std::string_view path() const { return std::string_view(text_).substr(entry().path_begin, entry().path_size); }
  const int64_t* sizes() const { return sizes_.data() + entry().dims_begin; }
  /// Offsets and sizes of the last box of a kShard entry. Has no meaning for other kinds, whose one box is the whole.
  const int64_t* box_dims() const { return box_.data(); }
  /// Whether a number of that box needs more than 32 bits.
  bool is_wide() const { return entry().kind == EntryKind::kShard && box_bits_ > UINT32_MAX; }
  RankSets::Id box_holders() const { return holders_; }

 private:
  struct Head {
    std::string_view bytes;
    Entry entry;  // says where its name and path are in text_, and its sizes in sizes_
  };

  bool read_sets(std::optional<uint32_t> as_rank);
  bool repeat_head();
  bool read_head();
  bool read_place(uint8_t flags, const Entry* before, Entry* entry);
  bool read_tensor(Entry* entry);
  bool read_shared(uint64_t before, uint32_t before_size);
  void keep_head(Head head);
  bool read_num_boxes();
  bool read_box(uint32_t* words, bool is_wide);
  bool damaged() {
    reader_.fail();
    return false;
  }

  base::VarintReader reader_{std::string_view()};
  RankSets* rank_sets_;
  const bool remembers_;
  std::vector<RankSets::Id> sets_;
  uint32_t lowest_rank_ = 0;
  uint32_t highest_rank_ = 0;
  size_t num_entries_ = 0;
  size_t entries_left_ = 0;
  // The heads of this blob up to the current one; then, if all so far were repeated, the others of a blob before. If
  // the reader does not remember, only the current one.
  std::vector<Head> heads_;
  std::string text_;
  std::vector<int64_t> sizes_;
  size_t position_ = 0;
  bool is_repeated_ = false;
  std::vector<int64_t> box_;
  int64_t box_bits_ = 0;  // all numbers of box_, or-ed
  std::vector<int64_t> box_before_;
  uint32_t boxes_read_ = 0;
  uint64_t box_position_ = 0;
  RankSets::Id holders_ = 0;
};

}  // namespace bytecheckpoint::planner
