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
///     InventoryReader reader(blob, &rank_sets);
///     BCP_RETURN_IF_ERROR(reader.begin());
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
/// Not thread-safe.
class InventoryReader {
 public:
  /// \param blob  Must outlive the reader.
  /// \param rank_sets  Receives the sets of ranks; must outlive the reader.
  /// \param as_rank  If given, the blob must be of one rank, and counts as the inventory of this rank, whatever rank it
  /// names: a rank may not know its number when it encodes.
  InventoryReader(std::string_view blob, RankSets* rank_sets, std::optional<uint32_t> as_rank = std::nullopt)
      : reader_(blob), rank_sets_(rank_sets), as_rank_(as_rank) {}

  /// Reads the head. Must be called first. \returns kCorrupt if it is damaged.
  base::Status begin();
  /// Reads the next entry. \returns false at the end and after damage; `end` tells which.
  bool next();
  /// Reads the next box of the entry; must be called `entry().num_boxes` times. \returns false after damage.
  bool next_box();
  /// Returns kCorrupt if anything was damaged or is left unread.
  base::Status end();

  RankSets::Id ranks() const { return sets_[0]; }
  size_t num_entries() const { return num_entries_; }
  /// The current entry, without the fields that say where its name, dims and holders are stored.
  const Entry& entry() const { return entry_; }
  std::string_view fqn() const { return fqn_; }
  std::string_view path() const { return path_; }
  const int64_t* sizes() const { return sizes_.data(); }
  /// Offsets and sizes of the last box of a kShard entry. Has no meaning for other kinds, whose one box is the whole.
  const int64_t* box_dims() const { return box_.data(); }
  RankSets::Id box_holders() const { return holders_; }

 private:
  bool read_sets();
  bool read_set(std::vector<RankRun>* runs);
  bool read_tensor();
  bool read_shared(std::string* name);
  bool damaged() {
    reader_.fail();
    return false;
  }

  base::VarintReader reader_;
  RankSets* rank_sets_;
  const std::optional<uint32_t> as_rank_;
  std::vector<RankSets::Id> sets_;
  uint32_t lowest_rank_ = 0;
  uint32_t highest_rank_ = 0;
  size_t num_entries_ = 0;
  size_t entries_left_ = 0;
  Entry entry_;
  std::string fqn_;
  std::string path_;
  std::vector<int64_t> sizes_;
  std::vector<int64_t> box_;
  std::vector<int64_t> box_before_;
  uint32_t boxes_read_ = 0;
  uint64_t position_ = 0;
  RankSets::Id holders_ = 0;
};

}  // namespace bytecheckpoint::planner
