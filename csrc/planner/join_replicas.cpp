// SPDX-License-Identifier: Apache-2.0
#include "csrc/planner/join_replicas.h"

#include <algorithm>
#include <cstring>

#include "csrc/planner/box_words.h"

namespace bytecheckpoint::planner {

using base::Code;
using base::Status;
using base::text;

namespace {

size_t words_of_box(const FoundBoxes& boxes) {
  return num_words(2 * boxes.num_dims, boxes.is_wide);
}

}  // namespace

base::Result<size_t> ReplicaJoiner::join(const FoundBoxes& boxes, uint32_t* words, RankSets::Id* holders) {
  sort(boxes);
  const size_t num = words_of_box(boxes);
  size_t num_joined = 0, moved_to = 0;
  const auto move_to = [&](size_t end) {  // boxes that have no replicas follow one another, so many move at once
    if (words != boxes.words + moved_to * num)
      std::memmove(words, boxes.words + moved_to * num, 4 * num * (end - moved_to));
    words += num * (end - moved_to);
    if (holders != boxes.holders + moved_to) std::memmove(holders, boxes.holders + moved_to, 4 * (end - moved_to));
    holders += end - moved_to;
  };
  for (size_t first = 0; first < boxes.num_boxes; ++num_joined) {
    const uint32_t* box = boxes.words + first * num;
    size_t end = first + 1;
    while (end < boxes.num_boxes && compare_words(box, boxes.words + end * num, num) == 0) ++end;
    if (end - first > 1) {
      RankSets::Id joined = 0;
      BCP_RETURN_IF_ERROR(join_holders(boxes.fqn, boxes.holders + first, boxes.holders + end, &joined));
      move_to(first + 1);
      holders[-1] = joined;
      moved_to = end;
    }
    first = end;
  }
  move_to(boxes.num_boxes);
  return num_joined;
}

/// Replicas stay in their order.
void ReplicaJoiner::sort(const FoundBoxes& boxes) {
  if (boxes.num_dims == 0 || !find_order(boxes)) return;
  const size_t num = words_of_box(boxes);
  unsorted_words_.assign(boxes.words, boxes.words + boxes.num_boxes * num);
  unsorted_holders_.assign(boxes.holders, boxes.holders + boxes.num_boxes);
  uint32_t* words = boxes.words;
  RankSets::Id* holders = boxes.holders;
  for (const auto& [_, from] : order_) {
    const uint32_t* box = unsorted_words_.data() + from * num;
    for (size_t i = 0; i < num; ++i) *words++ = box[i];
    *holders++ = unsorted_holders_[from];
  }
}

/// Finds the order of the boxes. \returns false if they have it already.
bool ReplicaJoiner::find_order(const FoundBoxes& boxes) {
  const size_t num = words_of_box(boxes);
  const auto position = [&](size_t i) {
    uint64_t position = 0;
    for (size_t d = 0; d < boxes.num_dims; ++d) {
      const auto offset = static_cast<uint64_t>(unpack_number(boxes.words + i * num, d, boxes.is_wide));
      position = position * static_cast<uint64_t>(boxes.sizes[d]) + offset;
    }
    return position;
  };
  const auto compare = [&](size_t a, size_t b) {
    return compare_words(boxes.words + a * num, boxes.words + b * num, num);
  };
  uint64_t last = position(0);
  size_t num_sorted = 1;
  for (; num_sorted < boxes.num_boxes; ++num_sorted) {
    const uint64_t next = position(num_sorted);
    if (next < last || (next == last && compare(num_sorted - 1, num_sorted) > 0)) break;
    last = next;
  }
  if (num_sorted == boxes.num_boxes) return false;
  order_.clear();
  run_ends_.clear();
  for (uint32_t i = 0; i < boxes.num_boxes; ++i) {
    order_.emplace_back(position(i), i);
    if (i != 0 && order_[i].first < order_[i - 1].first) run_ends_.push_back(i);
  }
  run_ends_.push_back(boxes.num_boxes);
  merge_runs();
  // Different boxes that begin at the same place are rare: boxes without elements, and overlaps.
  const auto is_before = [&](const Place& a, const Place& b) {
    const int order = compare(a.second, b.second);
    return order != 0 ? order < 0 : a.second < b.second;
  };
  for (auto from = order_.begin(); from != order_.end();) {
    auto to = from + 1;
    while (to != order_.end() && to->first == from->first) ++to;
    if (to - from > 1 && !std::is_sorted(from, to, is_before)) std::sort(from, to, is_before);
    from = to;
  }
  return true;
}

/// Sorts order_ by position: merges neighbouring runs until one is left. Boxes at the same position stay in their
/// order. Replicas of sharded tensors make few runs, so this takes fewer passes than sorting.
void ReplicaJoiner::merge_runs() {
  merged_.resize(order_.size());
  const auto is_before = [](const Place& a, const Place& b) { return a.first < b.first; };
  const auto at = [this](size_t i) { return order_.begin() + static_cast<std::ptrdiff_t>(i); };
  while (run_ends_.size() > 1) {
    auto to = merged_.begin();
    size_t begin = 0, num_runs = 0;
    for (size_t i = 0; i < run_ends_.size(); i += 2) {
      const size_t middle = run_ends_[i];
      const size_t end = i + 1 < run_ends_.size() ? run_ends_[i + 1] : middle;
      to = std::merge(at(begin), at(middle), at(middle), at(end), to, is_before);
      run_ends_[num_runs++] = begin = end;
    }
    run_ends_.resize(num_runs);
    order_.swap(merged_);
  }
}

Status ReplicaJoiner::join_holders(std::string_view fqn, const RankSets::Id* first, const RankSets::Id* last,
                                   RankSets::Id* joined) {
  if (std::equal(first, last, last_joined_.begin(), last_joined_.end())) {
    *joined = last_union_;
    return Status::ok();
  }
  ranks_.clear();
  for (const RankSets::Id* id = first; id != last; ++id) unroll(*rank_sets_, *id, &ranks_);
  if (!std::is_sorted(ranks_.begin(), ranks_.end())) std::sort(ranks_.begin(), ranks_.end());
  const auto twice = std::adjacent_find(ranks_.begin(), ranks_.end());
  if (twice != ranks_.end()) {
    return Status::make(Code::kCorrupt,
                        text("inventory: '", fqn, "': two inventories say what rank ", *twice, " holds of it"));
  }
  last_joined_.assign(first, last);
  *joined = last_union_ = rank_sets_->intern(ranks_);
  return Status::ok();
}

void unroll(const RankSets& sets, RankSets::Id id, std::vector<uint32_t>* ranks) {
  if (ranks->size() > kMaxRanks) return;
  sets.for_each(id, [&](uint32_t rank) { ranks->push_back(rank); });
}

}  // namespace bytecheckpoint::planner
