// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>
#include <cstdint>
#include <string_view>
#include <utility>
#include <vector>

#include "csrc/base/status.h"
#include "csrc/planner/rank_sets.h"

namespace bytecheckpoint::planner {

/// The boxes of one entry as several inventories have them, in memory that the caller keeps.
struct FoundBoxes {
  std::string_view fqn;            // for messages
  const int64_t* sizes = nullptr;  // of the tensor; not read if it has no dims
  size_t num_dims = 0;             // 0 also for entries that have one box, which all their holders hold
  bool is_wide = false;            // see box_words.h
  uint32_t* words = nullptr;
  RankSets::Id* holders = nullptr;  // of each box
  size_t num_boxes = 0;
};

/// Brings boxes into the order of box_order.h and joins replicas: equal boxes become one box with all their holders.
/// Not thread-safe.
class ReplicaJoiner {
 public:
  /// \param rank_sets  Has the sets of the holders and receives their unions; must outlive the object.
  explicit ReplicaJoiner(RankSets* rank_sets) : rank_sets_(rank_sets) {}

  /// Joins the boxes of one entry, and changes their order where they are.
  ///
  /// \param words, holders  Receive the result. May be where the boxes are, or before, but not behind.
  /// \returns the number of different boxes; kCorrupt if two inventories say what one rank holds of the entry.
  /// O(n) for sorted boxes, and O(n log k) for k sorted sequences, one after the other.
  base::Result<size_t> join(const FoundBoxes& boxes, uint32_t* words, RankSets::Id* holders);

 private:
  using Place = std::pair<uint64_t, uint32_t>;  // position of a box in the tensor, and its number

  void sort(const FoundBoxes& boxes);
  bool find_order(const FoundBoxes& boxes);
  void merge_runs();
  base::Status join_holders(std::string_view fqn, const RankSets::Id* first, const RankSets::Id* last,
                            RankSets::Id* joined);

  RankSets* rank_sets_;
  std::vector<Place> order_, merged_;
  std::vector<size_t> run_ends_;  // of sequences in order_ that ascend by position
  std::vector<uint32_t> unsorted_words_;
  std::vector<RankSets::Id> unsorted_holders_;
  std::vector<uint32_t> ranks_;
  // The holders of the replicas that were joined last, and their union: the next replicas often have the same ones.
  std::vector<RankSets::Id> last_joined_;
  RankSets::Id last_union_ = 0;
};

/// Appends the ranks of a set to `ranks`. Does nothing once these are more than there can be: one of them must then be
/// there twice, which the caller finds.
void unroll(const RankSets& sets, RankSets::Id id, std::vector<uint32_t>* ranks);

}  // namespace bytecheckpoint::planner
