// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "csrc/base/index_table.h"

namespace bytecheckpoint::planner {

/// Ranks are below this limit. A blob that names a rank must not make us allocate arrays of any size.
inline constexpr uint32_t kMaxRanks = 1u << 20;

/// Evenly spaced ranks: `first`, `first + step`, ..., `count` of them.
struct RankRun {
  uint32_t first = 0;
  uint32_t step = 0;  // 0 if and only if count is 1
  uint32_t count = 1;

  uint32_t last() const { return first + step * (count - 1); }
  bool operator==(const RankRun& other) const {
    return first == other.first && step == other.step && count == other.count;
  }
};

/// A view of runs that are stored next to one another.
struct RankRuns {
  const RankRun* runs = nullptr;
  size_t size = 0;

  const RankRun* begin() const { return runs; }
  const RankRun* end() const { return runs + size; }
};

/// A pool of sets of ranks. Each different set is stored once and known by a number, its Id.
///
/// The sets of ranks that hold a part of a state are regular: one rank (FSDP), all ranks (DDP), every n-th rank (HSDP,
/// tensor parallel). So a set is stored as a list of runs, and a set of one rank takes no memory: its Id is the rank.
/// {0, 2, 4, 6, 9} is the runs (first 0, step 2, count 4) and (first 9, count 1).
///
/// A greedy walk over the ascending ranks makes the runs, so equal sets have equal runs, and a run of one rank can only
/// be the last. Ids depend on the order in which sets were added, so nothing that leaves the process may depend on
/// them.
/// Not thread-safe while sets are added.
class RankSets {
 public:
  using Id = uint32_t;

  /// Returns the Id of the set of one rank. Such an Id is valid in every pool.
  static Id single(uint32_t rank) { return rank; }
  static bool is_single(Id id) { return (id & kPooled) == 0; }
  /// Numbers the sets of several ranks: returns a number below `num_pooled()`.
  static uint32_t pool_index(Id id) { return id & ~kPooled; }
  size_t num_pooled() const { return sets_.size(); }

  /// Returns the Id of a set, which is added if it is new.
  /// \param ascending  At least one rank, strictly ascending, all below kMaxRanks.
  Id intern(const std::vector<uint32_t>& ascending);
  /// Does the same for a set given as runs. \returns false if the runs are not those that `intern` would make, or a
  /// rank is kMaxRanks or above. The runs may come from a damaged blob.
  bool intern_runs(const std::vector<RankRun>& runs, Id* id);

  /// Number of ranks, lowest rank and highest rank of a set. O(1).
  uint32_t size(Id id) const { return is_single(id) ? 1 : pooled(id).num_ranks; }
  uint32_t lowest(Id id) const { return is_single(id) ? id : runs_[pooled(id).begin].first; }
  uint32_t highest(Id id) const { return is_single(id) ? id : runs_[pooled(id).end - 1].last(); }
  /// Returns the runs of a set, valid until the next set is added.
  /// \param one  Memory for the run of a set of one rank; must outlive the result.
  RankRuns runs(Id id, RankRun* one) const;

  /// Calls `visit(rank)` for each rank of the set, in ascending order.
  template <class Visit>
  void for_each(Id id, Visit&& visit) const {
    if (is_single(id)) {
      visit(id);
      return;
    }
    RankRun one;
    for (const RankRun& run : runs(id, &one)) {
      for (uint32_t i = 0; i < run.count; ++i) visit(run.first + i * run.step);
    }
  }

  /// A total order that depends on nothing but the ranks: sets with fewer ranks first, then by their runs.
  bool is_before(Id a, Id b) const;

 private:
  static constexpr Id kPooled = 1u << 31;

  struct Pooled {
    uint32_t begin;  // in runs_
    uint32_t end;
    uint32_t num_ranks;
  };

  const Pooled& pooled(Id id) const { return sets_[pool_index(id)]; }
  Id intern_scratch();

  std::vector<RankRun> runs_;
  std::vector<Pooled> sets_;
  base::IndexTable table_;        // finds indices into sets_
  std::vector<RankRun> scratch_;  // runs of the set that is being added
};

}  // namespace bytecheckpoint::planner
