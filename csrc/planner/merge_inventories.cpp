// SPDX-License-Identifier: Apache-2.0
#include "csrc/planner/merge_inventories.h"

#include <algorithm>
#include <functional>
#include <numeric>
#include <optional>
#include <tuple>
#include <utility>

#include "csrc/planner/box_order.h"
#include "csrc/planner/inventory_blob.h"

namespace bytecheckpoint::planner {
namespace {

using base::Code;
using base::Status;
using base::text;

/// A box as one blob has it.
struct Record {
  uint64_t position;  // of its first element
  uint64_t dims;      // where its dims lie
  uint32_t entry;
  RankSets::Id holders;
};

class Merger {
 public:
  Status add(std::string_view blob, std::optional<uint32_t> as_rank = std::nullopt);
  base::Result<Inventory> finish();

 private:
  Status add_entry(const InventoryReader& reader, uint32_t* number);
  Status join_properties(const InventoryReader& reader, Entry* entry);
  Status join_ranks();
  std::vector<uint32_t> order_of_entries() const;
  void group_records();
  Status append_boxes(uint32_t number, Entry* entry);
  void sort_records(const Entry& entry, size_t first, size_t last);
  Status join_holders(const Entry& entry, size_t first, size_t last, RankSets::Id* holders);

  const int64_t* box_dims(size_t at) const { return record_dims_.data() + records_[order_[at].second].dims; }
  size_t box_numbers(const Entry& entry) const {
    return entry.kind == EntryKind::kShard ? 2 * size_t{entry.num_dims} : 0;
  }

  Inventory found_;  // entries in the order in which they were found, without boxes
  base::IndexTable names_;
  std::vector<uint32_t> blob_of_entry_;  // the last that had it
  uint32_t num_blobs_ = 0;
  uint32_t expected_ = 0;  // ranks have much the same entries in much the same order
  std::vector<RankSets::Id> ranks_;

  std::vector<Record> records_;
  std::vector<int64_t> record_dims_;
  std::vector<uint64_t> groups_;                      // of order_, one an entry, and the end
  std::vector<std::pair<uint64_t, uint32_t>> order_;  // (position, record), grouped by entry
  std::vector<uint32_t> scratch_;
  std::vector<int64_t> dims_;
  std::vector<RankSets::Id> holders_;
};

Status Merger::add(std::string_view blob, std::optional<uint32_t> as_rank) {
  InventoryReader reader(blob, &found_.rank_sets, as_rank);
  BCP_RETURN_IF_ERROR(reader.begin());
  ++num_blobs_;
  expected_ = 0;
  ranks_.push_back(reader.ranks());
  while (reader.next()) {
    Record record{};
    BCP_RETURN_IF_ERROR(add_entry(reader, &record.entry));
    const size_t num_numbers = box_numbers(reader.entry());
    for (uint32_t b = 0; b < reader.entry().num_boxes && reader.next_box(); ++b) {
      record.position = num_numbers == 0 ? 0 : reader.box_position();
      record.dims = record_dims_.size();
      record.holders = reader.box_holders();
      record_dims_.insert(record_dims_.end(), reader.box_dims(), reader.box_dims() + num_numbers);
      records_.push_back(record);
    }
  }
  return reader.end();
}

Status Merger::add_entry(const InventoryReader& reader, uint32_t* number) {
  const auto is_same = [&](uint32_t index) { return found_.fqn(found_.entries[index]) == reader.fqn(); };
  if (expected_ < found_.entries.size() && is_same(expected_)) {
    *number = expected_;
  } else {
    const uint64_t hash = std::hash<std::string_view>()(reader.fqn());
    *number = names_.find(hash, is_same);
    if (*number == base::IndexTable::kNone) {
      *number = static_cast<uint32_t>(found_.entries.size());
      names_.insert(hash, *number);
      Entry entry = reader.entry();
      entry.fqn_begin = found_.text.size();
      entry.path_begin = entry.fqn_begin + entry.fqn_size;
      entry.dims_begin = found_.dims.size();
      found_.text.append(reader.fqn()).append(reader.path());
      found_.dims.insert(found_.dims.end(), reader.sizes(), reader.sizes() + entry.num_dims);
      found_.entries.push_back(entry);
      blob_of_entry_.push_back(0);
    }
  }
  expected_ = *number + 1;
  if (blob_of_entry_[*number] == num_blobs_) {
    return Status::make(Code::kCorrupt, text("inventory: '", reader.fqn(), "' stands in it twice"));
  }
  blob_of_entry_[*number] = num_blobs_;
  return join_properties(reader, &found_.entries[*number]);
}

Status Merger::join_properties(const InventoryReader& reader, Entry* entry) {
  const Entry& other = reader.entry();
  if (other.kind != entry->kind || other.dtype != entry->dtype || other.num_dims != entry->num_dims ||
      !std::equal(reader.sizes(), reader.sizes() + other.num_dims, found_.sizes(*entry))) {
    Inventory one;  // the other's entry alone, to be put into words
    one.dims.assign(reader.sizes(), reader.sizes() + other.num_dims);
    std::string wanted = text("rank ", entry->first_rank, " has ", to_text(found_, *entry));
    std::string got = text("rank ", other.first_rank, " has ", to_text(one, other));
    if (other.first_rank < entry->first_rank) wanted.swap(got);
    return Status::make(Code::kInvalidArgument, text("'", reader.fqn(), "': ", wanted, ", ", got));
  }
  entry->can_split = entry->can_split && other.can_split;
  if (other.first_rank >= entry->first_rank) return Status::ok();
  entry->first_rank = other.first_rank;
  entry->ordinal = other.ordinal;
  entry->requires_grad = other.requires_grad;
  entry->pin_memory = other.pin_memory;
  entry->memory_format = other.memory_format;
  if (found_.path(*entry) != reader.path()) {
    entry->path_begin = found_.text.size();
    entry->path_size = other.path_size;
    found_.text.append(reader.path());
  }
  return Status::ok();
}

base::Result<Inventory> Merger::finish() {
  if (records_.size() > UINT32_MAX / 2) {
    return Status::make(Code::kInvalidArgument, text("inventories of ", records_.size(), " boxes: too many"));
  }
  BCP_RETURN_IF_ERROR(join_ranks());
  group_records();
  std::vector<Entry> entries;
  entries.reserve(found_.entries.size());
  holders_.reserve(records_.size());
  dims_.reserve(record_dims_.size() + 3 * found_.dims.size());
  for (const uint32_t number : order_of_entries()) {
    entries.push_back(found_.entries[number]);
    BCP_RETURN_IF_ERROR(append_boxes(number, &entries.back()));
  }
  found_.entries = std::move(entries);
  found_.dims = std::move(dims_);
  found_.holders = std::move(holders_);
  return std::move(found_);
}

Status Merger::join_ranks() {
  found_.ranks = ranks_[0];
  if (ranks_.size() == 1) return Status::ok();
  scratch_.clear();
  for (const RankSets::Id ranks : ranks_) {
    found_.rank_sets.for_each(ranks, [&](uint32_t rank) { scratch_.push_back(rank); });
  }
  std::sort(scratch_.begin(), scratch_.end());
  const auto twice = std::adjacent_find(scratch_.begin(), scratch_.end());
  if (twice != scratch_.end()) {
    return Status::make(Code::kInvalidArgument, text("rank ", *twice, " is in two inventories"));
  }
  found_.ranks = found_.rank_sets.intern(scratch_);
  return Status::ok();
}

std::vector<uint32_t> Merger::order_of_entries() const {
  std::vector<uint32_t> order(found_.entries.size());
  std::iota(order.begin(), order.end(), 0);
  std::sort(order.begin(), order.end(), [this](uint32_t a, uint32_t b) {
    const Entry& x = found_.entries[a];
    const Entry& y = found_.entries[b];
    if (x.first_rank != y.first_rank) return x.first_rank < y.first_rank;
    return x.ordinal != y.ordinal ? x.ordinal < y.ordinal : found_.fqn(x) < found_.fqn(y);
  });
  return order;
}

/// Counting sort by entry. Within one, records stay in the order of the blobs.
void Merger::group_records() {
  groups_.assign(found_.entries.size() + 1, 0);
  for (const Record& record : records_) ++groups_[record.entry + 1];
  std::partial_sum(groups_.begin(), groups_.end(), groups_.begin());
  std::vector<uint64_t> next(groups_.begin(), groups_.end() - 1);
  order_.resize(records_.size());
  for (uint32_t i = 0; i < records_.size(); ++i) {
    order_[next[records_[i].entry]++] = {records_[i].position, i};
  }
}

Status Merger::append_boxes(uint32_t number, Entry* entry) {
  const int64_t* sizes = found_.sizes(found_.entries[number]);
  entry->dims_begin = dims_.size();
  entry->boxes_begin = static_cast<uint32_t>(holders_.size());
  entry->num_boxes = 0;
  dims_.insert(dims_.end(), sizes, sizes + entry->num_dims);
  if (entry->kind == EntryKind::kTensor) {
    dims_.insert(dims_.end(), entry->num_dims, 0);
    dims_.insert(dims_.end(), sizes, sizes + entry->num_dims);
  }
  const size_t last = groups_[number + 1];
  const size_t num_numbers = box_numbers(*entry);
  sort_records(*entry, groups_[number], last);
  for (size_t first = groups_[number]; first < last;) {
    size_t end = first + 1;
    while (end < last && order_[end].first == order_[first].first &&
           std::equal(box_dims(end), box_dims(end) + num_numbers, box_dims(first))) {
      ++end;
    }
    RankSets::Id holders = records_[order_[first].second].holders;
    if (end - first > 1) BCP_RETURN_IF_ERROR(join_holders(*entry, first, end, &holders));
    dims_.insert(dims_.end(), box_dims(first), box_dims(first) + num_numbers);
    holders_.push_back(holders);
    ++entry->num_boxes;
    first = end;
  }
  return Status::ok();
}

void Merger::sort_records(const Entry& entry, size_t first, size_t last) {
  if (entry.kind != EntryKind::kShard) return;
  const auto begin = order_.begin();
  const auto at = [&](size_t i) { return begin + static_cast<std::ptrdiff_t>(i); };
  if (!std::is_sorted(at(first), at(last))) std::sort(at(first), at(last));
  // Replicas are equal; boxes that differ and begin at one place are rare: those without elements, and overlaps.
  const auto is_before = [&](const auto& a, const auto& b) {
    const int order = compare_boxes(record_dims_.data() + records_[a.second].dims,
                                    record_dims_.data() + records_[b.second].dims, entry.num_dims);
    return order != 0 ? order < 0 : a.second < b.second;
  };
  for (size_t i = first; i < last;) {
    size_t end = i + 1;
    while (end < last && order_[end].first == order_[i].first) ++end;
    if (end - i > 1 && !std::is_sorted(at(i), at(end), is_before)) std::sort(at(i), at(end), is_before);
    i = end;
  }
}

Status Merger::join_holders(const Entry& entry, size_t first, size_t last, RankSets::Id* holders) {
  scratch_.clear();
  for (size_t i = first; i < last; ++i) {
    found_.rank_sets.for_each(records_[order_[i].second].holders, [&](uint32_t rank) { scratch_.push_back(rank); });
  }
  if (!std::is_sorted(scratch_.begin(), scratch_.end())) std::sort(scratch_.begin(), scratch_.end());
  const auto twice = std::adjacent_find(scratch_.begin(), scratch_.end());
  if (twice != scratch_.end()) {
    return Status::make(Code::kCorrupt,
                        text("inventory: '", found_.fqn(entry), "': two say what rank ", *twice, " holds of it"));
  }
  *holders = found_.rank_sets.intern(scratch_);
  return Status::ok();
}

}  // namespace

base::Result<Inventory> merge_inventories(const std::vector<std::string_view>& blobs) {
  if (blobs.empty()) return Status::make(Code::kInvalidArgument, "no inventory to merge");
  Merger merger;
  for (const std::string_view blob : blobs) BCP_RETURN_IF_ERROR(merger.add(blob));
  return merger.finish();
}

base::Result<Inventory> merge_ranks(const std::vector<std::string_view>& blobs) {
  if (blobs.empty()) return Status::make(Code::kInvalidArgument, "no inventory to merge");
  Merger merger;
  for (size_t rank = 0; rank < blobs.size(); ++rank) {
    BCP_RETURN_IF_ERROR(merger.add(blobs[rank], static_cast<uint32_t>(rank)));
  }
  return merger.finish();
}

base::Result<Inventory> merge_below(std::string_view own, uint32_t rank, const std::vector<std::string_view>& below) {
  Merger merger;
  BCP_RETURN_IF_ERROR(merger.add(own, rank));
  for (const std::string_view blob : below) BCP_RETURN_IF_ERROR(merger.add(blob));
  return merger.finish();
}

base::Result<Inventory> decode_inventory(std::string_view blob) {
  return merge_inventories({blob});
}

}  // namespace bytecheckpoint::planner
