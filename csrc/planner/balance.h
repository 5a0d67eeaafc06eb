// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <vector>

#include "csrc/planner/inventory.h"
#include "csrc/planner/save_plan.h"

namespace bytecheckpoint::planner {

/// The part of `plan_save` that decides who writes what; see there for the rules. An object makes one plan. The
/// inventory must be valid and of ranks 0 to num_ranks - 1; inventory and options must outlive the object.
class Balance {
 public:
  Balance(const Inventory& inventory, const SaveOptions& options, uint32_t num_ranks);

  /// Makes the plan. May be called once.
  SavePlan run() &&;

 private:
  /// A box that several ranks hold.
  struct Shared {
    uint32_t group;  // its set of holders: the id in the inventory, after group_by_holders a number in groups_
    uint32_t box;
    uint32_t entry;
    bool can_split;
    int64_t grain;  // bytes of the smallest piece that can be moved to another rank
    int64_t bytes;
  };
  /// A rank of the current group and its load. Ordered by load, least first; ties go to the lower rank.
  struct Holder {
    int64_t load;
    uint32_t rank;
    bool operator>(const Holder& other) const { return load != other.load ? load > other.load : rank > other.rank; }
  };

  void give_or_collect(uint32_t entry_number);
  void leave_out_hidden(const Entry& entry);
  bool splits_may_collide(const Entry& entry) const;
  const int64_t* box(const Entry& entry, size_t number) const { return boxes_.data() + 2 * number * entry.num_dims; }
  void group_by_holders();
  void balance_group(size_t first, size_t last);
  int64_t share(size_t first, size_t last) const;
  void split(const Shared& shared, int64_t target);
  void give(uint32_t box, uint32_t rank, int64_t bytes);
  void put(Holder holder);
  Holder take_least();

  const Inventory& inventory_;
  const SaveOptions& options_;
  SavePlan plan_;
  std::vector<int64_t> loads_;  // of each rank: bytes and costs of records, given so far
  int64_t total_load_ = 0;      // of all boxes, given or not
  std::vector<int64_t> boxes_;  // of the entry that give_or_collect handles
  std::vector<Shared> shared_;
  std::vector<RankSets::Id> groups_;
  std::vector<Holder> heap_;  // the holders of the current group, as a min-heap
  std::vector<Holder> taken_;
};

}  // namespace bytecheckpoint::planner
