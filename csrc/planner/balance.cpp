// SPDX-License-Identifier: Apache-2.0
#include "csrc/planner/balance.h"

#include <algorithm>
#include <functional>
#include <numeric>
#include <tuple>
#include <utility>

namespace bytecheckpoint::planner {
namespace {

/// A box may lift its writer above its share by 1/256 of the share. This saves splits, and the balance stays well
/// within 1.02.
constexpr int64_t kSlackDivisor = 256;

}  // namespace

Balance::Balance(const Inventory& inventory, const SaveOptions& options, uint32_t num_ranks)
    : inventory_(inventory), options_(options), loads_(num_ranks, 0) {
  plan_.writers.assign(inventory.num_boxes(), SavePlan::kNobody);
  plan_.rank_bytes.assign(num_ranks, 0);
  plan_.first_part.push_back(0);
}

SavePlan Balance::run() && {
  for (uint32_t e = 0; e < inventory_.entries.size(); ++e) give_or_collect(e);
  group_by_holders();
  for (size_t first = 0; first < shared_.size();) {
    size_t last = first + 1;
    while (last < shared_.size() && shared_[last].group == shared_[first].group) ++last;
    balance_group(first, last);
    first = last;
  }
  return std::move(plan_);
}

/// Gives away the boxes that leave no choice, and collects the others in shared_.
void Balance::give_or_collect(uint32_t entry_number) {
  const Entry& entry = inventory_.entries[entry_number];
  inventory_.unpack_boxes(entry, &boxes_);
  const tensor::DTypeInfo* dtype = entry.is_tensor() ? tensor::find_dtype(entry.dtype) : nullptr;
  const bool can_split = entry.can_split && dtype != nullptr && dtype->is_plain() && !splits_may_collide(entry);
  const int64_t element = element_bytes(entry);
  for (uint32_t b = 0; b < entry.num_boxes; ++b) {
    const uint32_t number = entry.boxes_begin + b;
    const RankSets::Id holders = inventory_.writers.empty() ? inventory_.holders[number] : inventory_.writers[number];
    const int64_t bytes = times_box(element, box(entry, b), entry.num_dims);
    if (RankSets::is_single(holders) || bytes == 0 || options_.dedup_to_lowest_rank) {
      give(number, inventory_.rank_sets.lowest(holders), bytes);
      total_load_ += bytes + kRecordCostBytes;
      continue;
    }
    const int64_t* sizes = box(entry, b) + entry.num_dims;
    const size_t dim = row_dim(sizes, entry.num_dims);
    Shared shared{holders, number, entry_number, false, bytes, bytes};
    if (can_split && dim < entry.num_dims && bytes / 2 >= options_.min_part_bytes) {
      shared.can_split = true;
      shared.grain = std::max(bytes / sizes[dim], options_.min_part_bytes);
    }
    shared_.push_back(shared);
    total_load_ += bytes + kRecordCostBytes;
  }
  if (entry.kind == EntryKind::kShard && entry.num_boxes > 1) leave_out_hidden(entry);
}

/// Stock readers find a record by the name and offsets alone. So of several boxes that begin at the same place, which
/// stand next to one another, only one is written: the one that has elements, or the first.
void Balance::leave_out_hidden(const Entry& entry) {
  const size_t num_dims = entry.num_dims;
  for (uint32_t first = 0; first < entry.num_boxes;) {
    const int64_t* offsets = box(entry, first);
    uint32_t kept = first;
    uint32_t last = first + 1;
    for (; last < entry.num_boxes; ++last) {
      const int64_t* other = box(entry, last);
      if (!std::equal(offsets, offsets + num_dims, other)) break;
      if (!is_empty_box(other, num_dims)) kept = last;
    }
    for (uint32_t b = first; b < last; ++b) {
      if (b != kept) plan_.writers[entry.boxes_begin + b] = SavePlan::kNobody;
    }
    first = last;
  }
}

/// Returns whether a box without elements begins where a part of another box could begin.
bool Balance::splits_may_collide(const Entry& entry) const {
  if (entry.kind != EntryKind::kShard || entry.num_boxes == 1) return false;
  const int64_t* sizes = inventory_.sizes(entry);
  for (uint32_t b = 0; b < entry.num_boxes; ++b) {
    const int64_t* offsets = box(entry, b);
    if (!is_empty_box(offsets, entry.num_dims)) continue;
    bool begins_inside = true;
    for (size_t d = 0; d < entry.num_dims; ++d) begins_inside = begins_inside && offsets[d] < sizes[d];
    if (begins_inside) return true;
  }
  return false;
}

/// Sorts the boxes by groups, one group per set of holders, smallest sets first: they have the least choice in giving
/// boxes away and must not wait. Before this call Shared::group is the id of the set; afterwards it is the number of
/// the group.
void Balance::group_by_holders() {
  std::vector<uint32_t> group_of(inventory_.rank_sets.num_pooled(), UINT32_MAX);
  const auto group = [&](const Shared& shared) -> uint32_t& { return group_of[RankSets::pool_index(shared.group)]; };
  for (const Shared& shared : shared_) {
    if (group(shared) != UINT32_MAX) continue;
    group(shared) = 0;
    groups_.push_back(shared.group);
  }
  std::sort(groups_.begin(), groups_.end(),
            [this](RankSets::Id a, RankSets::Id b) { return inventory_.rank_sets.is_before(a, b); });
  for (uint32_t g = 0; g < groups_.size(); ++g) group_of[RankSets::pool_index(groups_[g])] = g;
  // A counting sort by groups, and then a sort of each group, takes less time than one sort of all boxes.
  std::vector<size_t> ends(groups_.size() + 1, 0);
  for (Shared& shared : shared_) ++ends[(shared.group = group(shared)) + 1];
  std::partial_sum(ends.begin(), ends.end(), ends.begin());
  std::vector<Shared> grouped(shared_.size());
  for (const Shared& shared : shared_) grouped[ends[shared.group]++] = shared;
  shared_.swap(grouped);
  for (size_t g = 0, begin = 0; g < groups_.size(); begin = ends[g++]) {
    const auto at = [this](size_t i) { return shared_.begin() + static_cast<std::ptrdiff_t>(i); };
    std::sort(at(begin), at(ends[g]), [](const Shared& a, const Shared& b) {
      return std::tie(b.grain, b.bytes, a.box) < std::tie(a.grain, a.bytes, b.box);
    });
  }
}

void Balance::balance_group(size_t first, size_t last) {
  const RankSets::Id holders = groups_[shared_[first].group];
  heap_.clear();
  inventory_.rank_sets.for_each(holders, [&](uint32_t rank) { heap_.push_back(Holder{loads_[rank], rank}); });
  // Every rank is asked for at least the mean of all ranks. Sets that come later fill up the ranks that have less.
  const auto num_ranks = static_cast<int64_t>(loads_.size());
  const int64_t target = std::max(share(first, last), (total_load_ + num_ranks - 1) / num_ranks);
  std::make_heap(heap_.begin(), heap_.end(), std::greater<Holder>());
  for (size_t i = first; i < last; ++i) {
    const Shared& shared = shared_[i];
    const int64_t load = heap_.front().load + shared.bytes + kRecordCostBytes;
    if (shared.can_split && load > target + target / kSlackDivisor) {
      split(shared, target);
      continue;
    }
    Holder holder = take_least();
    give(shared.box, holder.rank, shared.bytes);
    holder.load = load;
    put(holder);
  }
}

/// Returns the load that the holders in `heap_` would reach if the bytes of the boxes could be spread over them freely.
int64_t Balance::share(size_t first, size_t last) const {
  int64_t sum = 0;
  for (size_t i = first; i < last; ++i) sum += shared_[i].bytes + kRecordCostBytes;
  std::vector<int64_t> loads;
  loads.reserve(heap_.size());
  for (const Holder& holder : heap_) loads.push_back(holder.load);
  std::sort(loads.begin(), loads.end());
  int64_t level = 0;
  for (size_t num = 0; num < loads.size() && (num == 0 || loads[num] < level); ++num) {
    sum += loads[num];
    level = (sum + static_cast<int64_t>(num)) / static_cast<int64_t>(num + 1);  // rounded up
  }
  return level;
}

void Balance::split(const Shared& shared, int64_t target) {
  const Entry& entry = inventory_.entries[shared.entry];
  BoxArray numbers;
  const int64_t* sizes = inventory_.box_dims(entry, shared.box - entry.boxes_begin, &numbers) + entry.num_dims;
  const int64_t num_rows = sizes[row_dim(sizes, entry.num_dims)];
  const int64_t row_bytes = shared.bytes / num_rows;
  const int64_t min_rows = std::max<int64_t>((options_.min_part_bytes + row_bytes - 1) / row_bytes, 1);
  std::vector<Part> parts;
  taken_.clear();
  int64_t rows_left = num_rows;
  int64_t lacking = 0;  // bytes that the holders taken so far lack; carries what was rounded off to the next one
  while (rows_left > 0 && !heap_.empty()) {
    Holder holder = take_least();
    lacking += std::max<int64_t>(target - holder.load, 0);
    int64_t rows = std::min((lacking + row_bytes / 2) / row_bytes - (num_rows - rows_left), rows_left);
    if (rows >= (min_rows + 1) / 2) {
      rows = std::max(rows, min_rows);
      const int64_t behind = rows_left - rows;
      if (behind != 0 && behind < min_rows) rows = rows_left >= 2 * min_rows ? rows_left - min_rows : rows_left;
      parts.push_back(Part{holder.rank, 0, rows});
      holder.load += rows * row_bytes + kRecordCostBytes;
      rows_left -= rows;
    }
    taken_.push_back(holder);
  }
  for (const Holder& holder : taken_) put(holder);
  if (rows_left > 0) {  // left over from rounding: makes one more part, or one longer
    Holder holder = take_least();
    const auto same = std::find_if(parts.begin(), parts.end(), [&](const Part& p) { return p.rank == holder.rank; });
    if (same != parts.end()) {
      same->num_rows += rows_left;
    } else {
      parts.push_back(Part{holder.rank, 0, rows_left});
    }
    holder.load += rows_left * row_bytes;
    put(holder);
  }
  if (parts.size() == 1) {
    give(shared.box, parts[0].rank, shared.bytes);
    return;
  }
  std::sort(parts.begin(), parts.end(), [](const Part& a, const Part& b) { return a.rank < b.rank; });
  int64_t row = 0;
  for (Part& part : parts) {
    part.first_row = row;
    row += part.num_rows;
    loads_[part.rank] += part.num_rows * row_bytes + kRecordCostBytes;
    plan_.rank_bytes[part.rank] += part.num_rows * row_bytes;
  }
  plan_.writers[shared.box] = SavePlan::kSplit | static_cast<uint32_t>(plan_.first_part.size() - 1);
  plan_.parts.insert(plan_.parts.end(), parts.begin(), parts.end());
  plan_.first_part.push_back(plan_.parts.size());
}

void Balance::give(uint32_t box, uint32_t rank, int64_t bytes) {
  plan_.writers[box] = rank;
  loads_[rank] += bytes + kRecordCostBytes;
  plan_.rank_bytes[rank] += bytes;
}

void Balance::put(Holder holder) {
  heap_.push_back(holder);
  std::push_heap(heap_.begin(), heap_.end(), std::greater<Holder>());
}

Balance::Holder Balance::take_least() {
  std::pop_heap(heap_.begin(), heap_.end(), std::greater<Holder>());
  const Holder least = heap_.back();
  heap_.pop_back();
  return least;
}

}  // namespace bytecheckpoint::planner
