// SPDX-License-Identifier: Apache-2.0
#include "csrc/planner/rank_sets.h"

#include <algorithm>
#include <tuple>

namespace bytecheckpoint::planner {
namespace {

uint64_t hash_of(const std::vector<RankRun>& runs) {
  uint64_t hash = runs.size();
  for (const RankRun& run : runs) {
    for (const uint64_t word : {uint64_t{run.first} << 32 | run.step, uint64_t{run.count}}) {
      hash = base::spread_hash(hash ^ word);
    }
  }
  return hash;
}

}  // namespace

RankSets::Id RankSets::intern(const std::vector<uint32_t>& ascending) {
  scratch_.clear();
  for (size_t i = 0; i < ascending.size();) {
    RankRun run{ascending[i], 0, 1};
    if (++i < ascending.size()) {
      run.step = ascending[i] - run.first;
      while (i < ascending.size() && ascending[i] == run.last() + run.step) {
        ++run.count;
        ++i;
      }
    }
    scratch_.push_back(run);
  }
  return intern_scratch();
}

bool RankSets::intern_runs(const std::vector<RankRun>& runs, Id* id) {
  if (runs.empty()) return false;
  for (size_t i = 0; i < runs.size(); ++i) {
    const RankRun& run = runs[i];
    if (run.count == 0 || (run.count == 1) != (run.step == 0) || run.first >= kMaxRanks) return false;
    if (uint64_t{run.first} + uint64_t{run.step} * (run.count - 1) >= kMaxRanks) return false;
    if (i == 0) continue;
    const RankRun& before = runs[i - 1];
    if (before.count == 1 || run.first <= before.last() || run.first == before.last() + before.step) return false;
  }
  scratch_ = runs;
  *id = intern_scratch();
  return true;
}

RankSets::Id RankSets::intern_scratch() {
  if (scratch_.size() == 1 && scratch_[0].count == 1) return single(scratch_[0].first);
  const uint64_t hash = hash_of(scratch_);
  const uint32_t found = table_.find(hash, [&](uint32_t index) {
    const Pooled& set = sets_[index];
    return set.end - set.begin == scratch_.size() &&
           std::equal(scratch_.begin(), scratch_.end(), runs_.begin() + set.begin);
  });
  if (found != base::IndexTable::kNone) return found | kPooled;
  Pooled set{static_cast<uint32_t>(runs_.size()), 0, 0};
  for (const RankRun& run : scratch_) {
    runs_.push_back(run);
    set.num_ranks += run.count;
  }
  set.end = static_cast<uint32_t>(runs_.size());
  const auto index = static_cast<uint32_t>(sets_.size());
  sets_.push_back(set);
  table_.insert(hash, index);
  return index | kPooled;
}

RankRuns RankSets::runs(Id id, RankRun* one) const {
  if (is_single(id)) {
    *one = RankRun{id, 0, 1};
    return {one, 1};
  }
  return {runs_.data() + pooled(id).begin, pooled(id).end - pooled(id).begin};
}

bool RankSets::is_before(Id a, Id b) const {
  if (size(a) != size(b)) return size(a) < size(b);
  RankRun one_a;
  RankRun one_b;
  const RankRuns of_a = runs(a, &one_a);
  const RankRuns of_b = runs(b, &one_b);
  return std::lexicographical_compare(of_a.begin(), of_a.end(), of_b.begin(), of_b.end(),
                                      [](const RankRun& x, const RankRun& y) {
                                        return std::tie(x.first, x.step, x.count) < std::tie(y.first, y.step, y.count);
                                      });
}

}  // namespace bytecheckpoint::planner
