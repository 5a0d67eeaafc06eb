// SPDX-License-Identifier: Apache-2.0
#include "csrc/planner/rank_set_codec.h"

namespace bytecheckpoint::planner {
namespace {

constexpr size_t kLeastRunBytes = 2;

}  // namespace

void write_set(const RankSets& sets, RankSets::Id id, base::VarintWriter* out) {
  RankRun one;
  const RankRuns runs = sets.runs(id, &one);
  out->number(runs.size);
  uint32_t behind = 0;
  for (const RankRun& run : runs) {
    out->number(run.first - behind);
    out->number(run.count);
    if (run.count > 1) out->number(run.step);
    behind = run.last() + 1;
  }
}

bool read_set(base::VarintReader* reader, RankSets* sets, RankSets::Id* id) {
  std::vector<RankRun> runs(reader->count(kLeastRunBytes));
  uint64_t behind = 0;
  for (RankRun& run : runs) {
    const uint64_t first = behind + reader->u32();
    run.count = reader->u32();
    run.step = run.count > 1 ? reader->u32() : 0;
    const uint64_t last = first + uint64_t{run.step} * (uint64_t{run.count} - 1);
    if (!reader->ok() || run.count == 0 || first >= kMaxRanks || last >= kMaxRanks) return false;
    run.first = static_cast<uint32_t>(first);
    behind = last + 1;
  }
  return reader->ok() && sets->intern_runs(runs, id);
}

uint32_t SetNumbers::number(RankSets::Id id) {
  if (id == last_id_ && !ids_.empty()) return last_number_;
  const uint64_t hash = base::spread_hash(id);
  uint32_t found = table_.find(hash, [&](uint32_t index) { return ids_[index] == id; });
  if (found == base::IndexTable::kNone) {
    found = static_cast<uint32_t>(ids_.size());
    ids_.push_back(id);
    table_.insert(hash, found);
  }
  last_id_ = id;
  last_number_ = found;
  return found;
}

}  // namespace bytecheckpoint::planner
