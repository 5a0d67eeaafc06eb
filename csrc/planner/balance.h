// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <vector>

#include "csrc/planner/inventory.h"
#include "csrc/planner/save_plan.h"

namespace bytecheckpoint::planner {

/// The part of `plan_save` that decides. Made for one plan of a valid inventory of ranks 0 to num_ranks - 1.
class Balance {
 public:
  Balance(const Inventory& inventory, const SaveOptions& options, uint32_t num_ranks);

  SavePlan run() &&;

 private:
  /// A box that several ranks hold.
  struct Shared {
    uint32_t group;  // number of its set of holders
    uint32_t box;
    uint32_t entry;
    bool can_split;
    int64_t grain;  // smallest piece that can be moved
    int64_t bytes;
  };
  /// Least loaded first, ties to the lower rank.
  struct Holder {
    int64_t load;
    uint32_t rank;
    bool operator>(const Holder& other) const { return load != other.load ? load > other.load : rank > other.rank; }
  };

  void give_or_collect(uint32_t entry_number);
  void leave_out_hidden(const Entry& entry);
  bool splits_may_collide(const Entry& entry) const;
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
  std::vector<int64_t> loads_;  // bytes and cost of records
  int64_t total_load_ = 0;      // of all that is and will be given
  std::vector<Shared> shared_;
  std::vector<RankSets::Id> groups_;
  std::vector<Holder> heap_;  // holders of the group
  std::vector<Holder> taken_;
};

}  // namespace bytecheckpoint::planner
