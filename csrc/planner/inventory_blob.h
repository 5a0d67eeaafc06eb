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

/// The inventory as bytes, to be sent to another process of the same build. A pure function of its content: equal
/// inventories have equal bytes, whatever they were merged from.
std::string encode_inventory(const Inventory& inventory);

/// Reads such bytes, which may be damaged or hostile, entry by entry. Takes no memory beyond a small multiple of them.
///
///     InventoryReader reader(blob, &rank_sets);
///     BCP_RETURN_IF_ERROR(reader.begin());
///     while (reader.next()) { reader.entry(), fqn(), path(), sizes(); for each of entry().num_boxes: next_box(); }
///     BCP_RETURN_IF_ERROR(reader.end());
///
/// What it gives out is as InventoryBuilder would take it: dtypes known, sizes possible, boxes of an entry in order,
/// ranks within those of the inventory. That names are unique is left to whoever collects them.
class InventoryReader {
 public:
  /// \param rank_sets  Where the sets of ranks go; must outlive the reader.
  /// \param as_rank    The inventory is that of this rank, whatever its own word: a rank may not know its number.
  InventoryReader(std::string_view blob, RankSets* rank_sets, std::optional<uint32_t> as_rank = std::nullopt)
      : reader_(blob), rank_sets_(rank_sets), as_rank_(as_rank) {}

  base::Status begin();
  /// False at the end and after damage.
  bool next();
  /// Once for each box of the entry.
  bool next_box();
  /// kCorrupt if anything was wrong.
  base::Status end();

  RankSets::Id ranks() const { return sets_[0]; }
  size_t num_entries() const { return num_entries_; }
  /// Without the places in pools.
  const Entry& entry() const { return entry_; }
  std::string_view fqn() const { return fqn_; }
  std::string_view path() const { return path_; }
  const int64_t* sizes() const { return sizes_.data(); }
  /// Of the last box read; of a kTensor or kBytes they are left alone.
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
