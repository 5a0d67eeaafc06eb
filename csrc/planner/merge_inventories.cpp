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

/// A box as one blob has it. The dims of all records are in record_dims_, in the order of the records.
struct Record {
  uint32_t entry;
  RankSets::Id holders;
};

/// Cuts off the end. Also gives back the memory if less than half is left, because an inventory that is kept keeps its
/// memory.
template <class T>
void shrink(std::vector<T>* numbers, size_t size) {
  const bool is_much = size < numbers->size() / 2;
  numbers->resize(size);
  if (is_much) numbers->shrink_to_fit();
}

/// Reads all blobs, one after the other, then moves what was read to its final place, entry by entry. Both steps walk
/// through memory in order, which matters when there is much of it.
class Merger {
 public:
  /// \param num_bytes  Bytes of all blobs that will be added.
  explicit Merger(size_t num_bytes) : num_bytes_(num_bytes) {}

  Status add(std::string_view blob, std::optional<uint32_t> as_rank = std::nullopt);
  base::Result<Inventory> finish();

 private:
  Status add_entry(const InventoryReader& reader, uint32_t* number);
  Status join_properties(const InventoryReader& reader, Entry* entry);
  Status join_ranks();
  std::vector<uint32_t> order_of_entries() const;
  void lay_out(const std::vector<uint32_t>& order);
  void group_records();
  Status join_boxes(Entry* entry);
  void sort_boxes(const Entry& entry);
  void unroll(RankSets::Id ranks);
  Status join_holders(const Entry& entry, size_t first, size_t last, RankSets::Id* holders);

  static size_t box_numbers(const Entry& entry) {
    return entry.kind == EntryKind::kShard ? 2 * size_t{entry.num_dims} : 0;
  }
  /// Returns how many numbers an entry takes in `dims`: its sizes, then its boxes. A plain tensor has one box, which
  /// its records leave out.
  static size_t room_of(const Entry& entry) {
    if (entry.kind == EntryKind::kTensor) return 3 * size_t{entry.num_dims};
    return entry.num_dims + entry.num_boxes * box_numbers(entry);
  }
  int64_t* boxes_of(const Entry& entry) { return dims_.data() + entry.dims_begin + entry.num_dims; }

  size_t num_bytes_;
  // Entries in the order in which they were found, each with the number of its records. Their positions refer to
  // found_.dims until `lay_out` runs, and from then on to dims_ and holders_ below.
  Inventory found_;
  base::IndexTable names_;
  std::vector<uint32_t> blob_of_entry_;  // number of the last blob that had the entry
  uint32_t num_blobs_ = 0;
  uint32_t expected_ = 0;  // guess for the next entry: ranks have much the same entries in the same order
  std::vector<RankSets::Id> ranks_;

  std::vector<Record> records_;
  std::vector<int64_t> record_dims_;

  // The inventory that is made. `lay_out` gives each entry room for all its records; joining replicas then moves
  // everything to the left.
  std::vector<int64_t> dims_;
  std::vector<RankSets::Id> holders_;
  size_t dims_end_ = 0, holders_end_ = 0;

  std::vector<uint32_t> scratch_;
  // The holders of the replicas that were joined last, and their union: the next replicas often have the same ones.
  std::vector<RankSets::Id> last_joined_;
  RankSets::Id last_union_ = 0;
  std::vector<std::pair<uint64_t, uint32_t>> order_;
  std::vector<int64_t> unsorted_dims_;
  std::vector<RankSets::Id> unsorted_holders_;
};

Status Merger::add(std::string_view blob, std::optional<uint32_t> as_rank) {
  if (as_rank.value_or(0) >= kMaxRanks) {
    return Status::make(Code::kInvalidArgument, text("rank ", *as_rank, ": must be below ", kMaxRanks));
  }
  InventoryReader reader(blob, &found_.rank_sets, as_rank);
  BCP_RETURN_IF_ERROR(reader.begin());
  ++num_blobs_;
  expected_ = 0;
  ranks_.push_back(reader.ranks());
  const bool is_first = records_.empty();
  while (reader.next()) {
    Record record{};
    BCP_RETURN_IF_ERROR(add_entry(reader, &record.entry));
    const size_t num_numbers = box_numbers(reader.entry());
    for (uint32_t b = 0; b < reader.entry().num_boxes && reader.next_box(); ++b) {
      record.holders = reader.box_holders();
      record_dims_.insert(record_dims_.end(), reader.box_dims(), reader.box_dims() + num_numbers);
      records_.push_back(record);
      ++found_.entries[record.entry].num_boxes;
    }
  }
  BCP_RETURN_IF_ERROR(reader.end());
  if (is_first && blob.size() < num_bytes_) {
    // Blobs are much alike, so the first one tells how much memory all will take. Memory that is reserved in vain is
    // never touched; an array that grows would be copied to memory that is cleared first.
    const double times = 1.1 * static_cast<double>(num_bytes_) / static_cast<double>(blob.size());
    records_.reserve(static_cast<size_t>(times * static_cast<double>(records_.size())));
    record_dims_.reserve(static_cast<size_t>(times * static_cast<double>(record_dims_.size())));
  }
  return Status::ok();
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
      entry.num_boxes = 0;  // boxes are counted as they come
      found_.text.append(reader.fqn()).append(reader.path());
      found_.dims.insert(found_.dims.end(), reader.sizes(), reader.sizes() + entry.num_dims);
      found_.entries.push_back(entry);
      blob_of_entry_.push_back(0);
    }
  }
  expected_ = *number + 1;
  if (blob_of_entry_[*number] == num_blobs_) {
    return Status::make(Code::kCorrupt, text("inventory: '", reader.fqn(), "' is in it twice"));
  }
  blob_of_entry_[*number] = num_blobs_;
  return join_properties(reader, &found_.entries[*number]);
}

Status Merger::join_properties(const InventoryReader& reader, Entry* entry) {
  const Entry& other = reader.entry();
  if (other.kind != entry->kind || other.dtype != entry->dtype || other.num_dims != entry->num_dims ||
      !std::equal(reader.sizes(), reader.sizes() + other.num_dims, found_.sizes(*entry))) {
    Inventory one;  // holds only the other rank's entry, for the message
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
    return Status::make(Code::kInvalidArgument,
                        text("the inventories have ", records_.size(), " boxes, which are too many"));
  }
  BCP_RETURN_IF_ERROR(join_ranks());
  const std::vector<uint32_t> order = order_of_entries();
  lay_out(order);
  group_records();
  std::vector<Entry> entries;
  entries.reserve(order.size());
  for (const uint32_t number : order) {
    entries.push_back(found_.entries[number]);
    BCP_RETURN_IF_ERROR(join_boxes(&entries.back()));
  }
  shrink(&dims_, dims_end_);
  shrink(&holders_, holders_end_);
  found_.entries = std::move(entries);
  found_.dims = std::move(dims_);
  found_.holders = std::move(holders_);
  return std::move(found_);
}

Status Merger::join_ranks() {
  found_.ranks = ranks_[0];
  if (ranks_.size() == 1) return Status::ok();
  scratch_.clear();
  for (const RankSets::Id ranks : ranks_) unroll(ranks);
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

/// Gives each entry room for its sizes and all its records, and copies the sizes there.
void Merger::lay_out(const std::vector<uint32_t>& order) {
  size_t num_numbers = 0;
  for (const Entry& entry : found_.entries) num_numbers += room_of(entry);
  dims_.resize(num_numbers);
  holders_.resize(records_.size());
  size_t dims = 0, boxes = 0;
  for (const uint32_t number : order) {
    Entry& entry = found_.entries[number];
    int64_t* at = std::copy_n(found_.sizes(entry), entry.num_dims, dims_.data() + dims);
    if (entry.kind == EntryKind::kTensor) std::copy_n(found_.sizes(entry), entry.num_dims, at + entry.num_dims);
    entry.dims_begin = dims;
    entry.boxes_begin = static_cast<uint32_t>(boxes);
    dims += room_of(entry);
    boxes += entry.num_boxes;
  }
}

/// A counting sort of the records by entry. Records of one entry stay in the order of the blobs.
void Merger::group_records() {
  std::vector<uint32_t> num_grouped(found_.entries.size(), 0);
  const int64_t* from = record_dims_.data();
  for (const Record& record : records_) {
    const Entry& entry = found_.entries[record.entry];
    const size_t number = num_grouped[record.entry]++;
    const size_t num_numbers = box_numbers(entry);
    std::copy_n(from, num_numbers, boxes_of(entry) + number * num_numbers);
    holders_[entry.boxes_begin + number] = record.holders;
    from += num_numbers;
  }
  std::vector<Record>().swap(records_);
  std::vector<int64_t>().swap(record_dims_);
}

/// Joins replicas to one box, and moves the entry to the end of the entry before it.
Status Merger::join_boxes(Entry* entry) {
  sort_boxes(*entry);
  const size_t num_numbers = box_numbers(*entry);
  const int64_t* boxes = boxes_of(*entry);
  const Entry read = *entry;
  int64_t* out = dims_.data() + dims_end_;
  const auto append = [&](const int64_t* numbers, size_t count) {
    if (out != numbers) std::copy_n(numbers, count, out);
    out += count;
  };
  append(dims_.data() + read.dims_begin, read.num_dims);
  if (read.kind == EntryKind::kTensor) append(boxes, 2 * size_t{read.num_dims});
  entry->dims_begin = dims_end_;
  entry->boxes_begin = static_cast<uint32_t>(holders_end_);
  entry->num_boxes = 0;
  for (size_t first = 0; first < read.num_boxes;) {
    const int64_t* box = boxes + first * num_numbers;
    size_t end = first + 1;
    while (end < read.num_boxes && std::equal(box, box + num_numbers, boxes + end * num_numbers)) ++end;
    RankSets::Id holders = holders_[read.boxes_begin + first];
    if (end - first > 1) {
      BCP_RETURN_IF_ERROR(join_holders(read, read.boxes_begin + first, read.boxes_begin + end, &holders));
    }
    append(box, num_numbers);
    holders_[holders_end_++] = holders;
    ++entry->num_boxes;
    first = end;
  }
  dims_end_ = static_cast<size_t>(out - dims_.data());
  return Status::ok();
}

/// Sorts the boxes into the order of box_order.h; replicas stay in the order of the blobs. If the blobs come in rank
/// order, most boxes are sorted already.
void Merger::sort_boxes(const Entry& entry) {
  if (entry.kind != EntryKind::kShard) return;
  const size_t num_numbers = box_numbers(entry);
  int64_t* boxes = boxes_of(entry);
  const int64_t* sizes = dims_.data() + entry.dims_begin;
  const auto position = [&](size_t i) { return first_position(sizes, boxes + i * num_numbers, entry.num_dims); };
  const auto compare = [&](size_t a, size_t b) {
    return compare_boxes(boxes + a * num_numbers, boxes + b * num_numbers, entry.num_dims);
  };
  uint64_t last = position(0);
  size_t num_sorted = 1;
  for (; num_sorted < entry.num_boxes; ++num_sorted) {
    const uint64_t next = position(num_sorted);
    if (next < last || (next == last && compare(num_sorted - 1, num_sorted) > 0)) break;
    last = next;
  }
  if (num_sorted == entry.num_boxes) return;

  order_.clear();
  for (uint32_t i = 0; i < entry.num_boxes; ++i) order_.emplace_back(position(i), i);
  std::sort(order_.begin(), order_.end());
  // Different boxes that begin at the same place are rare: boxes without elements, and overlaps.
  const auto is_before = [&](const auto& a, const auto& b) {
    const int order = compare(a.second, b.second);
    return order != 0 ? order < 0 : a.second < b.second;
  };
  for (auto from = order_.begin(); from != order_.end();) {
    auto to = from + 1;
    while (to != order_.end() && to->first == from->first) ++to;
    if (to - from > 1 && !std::is_sorted(from, to, is_before)) std::sort(from, to, is_before);
    from = to;
  }
  RankSets::Id* holders = holders_.data() + entry.boxes_begin;
  unsorted_dims_.assign(boxes, boxes + entry.num_boxes * num_numbers);
  unsorted_holders_.assign(holders, holders + entry.num_boxes);
  for (const auto& [_, from] : order_) {
    boxes = std::copy_n(unsorted_dims_.data() + from * num_numbers, num_numbers, boxes);
    *holders++ = unsorted_holders_[from];
  }
}

/// Appends the ranks of a set to scratch_. Does nothing once scratch_ has more ranks than there can be: one of them
/// must then be there twice, which the caller finds.
void Merger::unroll(RankSets::Id ranks) {
  if (scratch_.size() > kMaxRanks) return;
  found_.rank_sets.for_each(ranks, [&](uint32_t rank) { scratch_.push_back(rank); });
}

Status Merger::join_holders(const Entry& entry, size_t first, size_t last, RankSets::Id* holders) {
  const auto ids = holders_.begin() + static_cast<std::ptrdiff_t>(first);
  const auto ids_end = holders_.begin() + static_cast<std::ptrdiff_t>(last);
  if (std::equal(ids, ids_end, last_joined_.begin(), last_joined_.end())) {
    *holders = last_union_;
    return Status::ok();
  }
  scratch_.clear();
  for (auto id = ids; id != ids_end; ++id) unroll(*id);
  if (!std::is_sorted(scratch_.begin(), scratch_.end())) std::sort(scratch_.begin(), scratch_.end());
  const auto twice = std::adjacent_find(scratch_.begin(), scratch_.end());
  if (twice != scratch_.end()) {
    return Status::make(Code::kCorrupt, text("inventory: '", found_.fqn(entry), "': two inventories say what rank ",
                                             *twice, " holds of it"));
  }
  last_joined_.assign(ids, ids_end);
  *holders = last_union_ = found_.rank_sets.intern(scratch_);
  return Status::ok();
}

size_t bytes_of(const std::vector<std::string_view>& blobs) {
  return std::accumulate(blobs.begin(), blobs.end(), size_t{0},
                         [](size_t sum, auto blob) { return sum + blob.size(); });
}

}  // namespace

base::Result<Inventory> merge_inventories(const std::vector<std::string_view>& blobs) {
  if (blobs.empty()) return Status::make(Code::kInvalidArgument, "no inventory to merge");
  Merger merger(bytes_of(blobs));
  for (const std::string_view blob : blobs) BCP_RETURN_IF_ERROR(merger.add(blob));
  return merger.finish();
}

base::Result<Inventory> merge_ranks(const std::vector<std::string_view>& blobs) {
  if (blobs.empty()) return Status::make(Code::kInvalidArgument, "no inventory to merge");
  Merger merger(bytes_of(blobs));
  for (size_t rank = 0; rank < blobs.size(); ++rank) {
    BCP_RETURN_IF_ERROR(merger.add(blobs[rank], static_cast<uint32_t>(rank)));
  }
  return merger.finish();
}

base::Result<Inventory> merge_below(std::string_view own, uint32_t rank, const std::vector<std::string_view>& below) {
  Merger merger(own.size() + bytes_of(below));
  for (const std::string_view blob : below) BCP_RETURN_IF_ERROR(merger.add(blob));
  BCP_RETURN_IF_ERROR(merger.add(own, rank));
  return merger.finish();
}

base::Result<Inventory> decode_inventory(std::string_view blob) {
  return merge_inventories({blob});
}

}  // namespace bytecheckpoint::planner
