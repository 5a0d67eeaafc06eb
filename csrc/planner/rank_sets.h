// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "csrc/base/index_table.h"

namespace bytecheckpoint::planner {

/// Ranks are below this: arrays with a place for each rank are made on the word of a blob.
inline constexpr uint32_t kMaxRanks = 1u << 20;

/// Evenly spaced ranks: `first`, `first + step`, ...
struct RankRun {
  uint32_t first = 0;
  uint32_t step = 0;  // 0 if and only if count is 1
  uint32_t count = 1;

  uint32_t last() const { return first + step * (count - 1); }
  bool operator==(const RankRun& other) const {
    return first == other.first && step == other.step && count == other.count;
  }
};

/// Runs next to one another in memory.
struct RankRuns {
  const RankRun* runs = nullptr;
  size_t size = 0;

  const RankRun* begin() const { return runs; }
  const RankRun* end() const { return runs + size; }
};

/// Sets of ranks, each different one kept once and known by a number.
///
/// What holds the parts of a state is regular: one rank (FSDP), all of them (DDP), every n-th (HSDP, tensor parallel).
/// A set is therefore a list of runs, and a set of one rank takes no memory at all. The runs are those that a greedy
/// walk over the ascending ranks finds, so that equal sets have equal runs; a single rank is at most the last of them.
/// Numbers depend on the order of interning: nothing that leaves the process may follow from them.
class RankSets {
 public:
  using Id = uint32_t;

  static Id single(uint32_t rank) { return rank; }
  static bool is_single(Id id) { return (id & kPooled) == 0; }

  /// \param ascending  At least one rank, strictly ascending, below kMaxRanks.
  Id intern(const std::vector<uint32_t>& ascending);
  /// The same from runs; false if they are not what `intern` would make, or name a rank of kMaxRanks or above.
  bool intern_runs(const std::vector<RankRun>& runs, Id* id);

  uint32_t size(Id id) const { return is_single(id) ? 1 : pooled(id).num_ranks; }
  uint32_t lowest(Id id) const { return is_single(id) ? id : runs_[pooled(id).begin].first; }
  uint32_t highest(Id id) const { return is_single(id) ? id : runs_[pooled(id).end - 1].last(); }
  /// \param one  Takes the run of a single rank.
  RankRuns runs(Id id, RankRun* one) const;

  template <class Visit>
  void for_each(Id id, Visit&& visit) const {
    RankRun one;
    for (const RankRun& run : runs(id, &one)) {
      for (uint32_t i = 0; i < run.count; ++i) visit(run.first + i * run.step);
    }
  }

  /// A total order that depends on nothing but the ranks: fewest first, then by runs.
  bool is_before(Id a, Id b) const;

 private:
  static constexpr Id kPooled = 1u << 31;

  struct Pooled {
    uint32_t begin;  // of runs_
    uint32_t end;
    uint32_t num_ranks;
  };

  const Pooled& pooled(Id id) const { return sets_[id & ~kPooled]; }
  Id intern_scratch();

  std::vector<RankRun> runs_;
  std::vector<Pooled> sets_;
  base::IndexTable table_;        // of sets_
  std::vector<RankRun> scratch_;  // the set to be interned
};

}  // namespace bytecheckpoint::planner
