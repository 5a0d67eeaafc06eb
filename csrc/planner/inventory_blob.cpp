// SPDX-License-Identifier: Apache-2.0
#include "csrc/planner/inventory_blob.h"

#include <algorithm>

#include "csrc/planner/box_order.h"

namespace bytecheckpoint::planner {
namespace {

// blob    = version, sets, entries
// sets    = count, then for each set: number of runs, then for each run: first (counted from behind the run before),
//           count, and step if count > 1. Set 0 is the ranks whose inventory this is; the others follow in the order of
//           their first use.
// entries = count, then for each entry: flags, [first rank, ordinal], name, path, [dtype, dims, sizes], holders
//           name, path: number of bytes shared with the entry before (at most kMaxShared), then number of further
//           bytes, then those bytes
//           holders of a shard: number of boxes, then for each box offsets, sizes, set
//           holders of any other entry: set
constexpr uint8_t kInventoryVersion = 1;

constexpr uint8_t kKindMask = 3;
constexpr uint8_t kRequiresGrad = 1 << 2;
constexpr uint8_t kPinMemory = 1 << 3;
constexpr uint8_t kCanSplit = 1 << 4;
constexpr int kMemoryFormatShift = 5;
constexpr uint8_t kFollows = 1 << 7;  // this entry follows the one before in the same state dict

/// Limits how much a hostile blob can gain by sharing: a few bytes must not stand for many long names.
constexpr size_t kMaxShared = 255;

constexpr size_t kLeastSetBytes = 3;
constexpr size_t kLeastRunBytes = 2;
constexpr size_t kLeastEntryBytes = 6;

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

void write_shared(std::string_view before, std::string_view name, base::VarintWriter* out) {
  const size_t limit = std::min({before.size(), name.size(), kMaxShared});
  const auto differs = std::mismatch(name.begin(), name.begin() + static_cast<std::ptrdiff_t>(limit), before.begin());
  const auto shared = static_cast<size_t>(differs.first - name.begin());
  out->number(shared);
  out->number(name.size() - shared);
  out->raw(name.substr(shared));
}

/// Numbers sets in the order in which boxes use them first.
class SetNumbers {
 public:
  explicit SetNumbers(RankSets::Id first) { (void)number(first); }

  uint32_t number(RankSets::Id id) {
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
  const std::vector<RankSets::Id>& ids() const { return ids_; }

 private:
  std::vector<RankSets::Id> ids_;
  base::IndexTable table_;
  RankSets::Id last_id_ = 0;
  uint32_t last_number_ = 0;
};

void write_entry(const Inventory& inventory, size_t number, SetNumbers* sets, base::VarintWriter* out) {
  const Entry& entry = inventory.entries[number];
  const Entry* before = number == 0 ? nullptr : &inventory.entries[number - 1];
  const bool follows = before == nullptr
                           ? entry.first_rank == inventory.rank_sets.lowest(inventory.ranks) && entry.ordinal == 0
                           : entry.first_rank == before->first_rank && entry.ordinal == before->ordinal + 1;
  out->u8(static_cast<uint8_t>(static_cast<int>(entry.kind) | (entry.requires_grad ? kRequiresGrad : 0) |
                               (entry.pin_memory ? kPinMemory : 0) | (entry.can_split ? kCanSplit : 0) |
                               entry.memory_format << kMemoryFormatShift | (follows ? kFollows : 0)));
  if (!follows) {
    out->number(entry.first_rank);
    out->number(entry.ordinal);
  }
  write_shared(before == nullptr ? std::string_view() : inventory.fqn(*before), inventory.fqn(entry), out);
  write_shared(before == nullptr ? std::string_view() : inventory.path(*before), inventory.path(entry), out);
  if (entry.is_tensor()) {
    out->u8(static_cast<uint8_t>(entry.dtype));
    out->u8(entry.num_dims);
    const int64_t* sizes = inventory.sizes(entry);
    for (size_t d = 0; d < entry.num_dims; ++d) out->number(static_cast<uint64_t>(sizes[d]));
  }
  if (entry.kind == EntryKind::kShard) out->number(entry.num_boxes);
  for (size_t b = 0; b < entry.num_boxes; ++b) {
    if (entry.kind == EntryKind::kShard) {
      const int64_t* box = inventory.box_dims(entry, b);
      for (size_t i = 0; i < 2 * size_t{entry.num_dims}; ++i) out->number(static_cast<uint64_t>(box[i]));
    }
    out->number(sets->number(inventory.box_holders(entry, b)));
  }
}

}  // namespace

std::string encode_inventory(const Inventory& inventory) {
  base::VarintWriter entries;
  SetNumbers sets(inventory.ranks);
  entries.number(inventory.entries.size());
  for (size_t i = 0; i < inventory.entries.size(); ++i) write_entry(inventory, i, &sets, &entries);
  base::VarintWriter out;
  out.u8(kInventoryVersion);
  out.number(sets.ids().size());
  for (const RankSets::Id id : sets.ids()) write_set(inventory.rank_sets, id, &out);
  out.raw(entries.take());
  return out.take();
}

base::Status InventoryReader::begin() {
  if (reader_.u8() == kInventoryVersion && read_sets()) {
    num_entries_ = entries_left_ = reader_.count(kLeastEntryBytes);
  } else {
    reader_.fail();
  }
  return reader_.ok() ? base::Status::ok() : end();
}

bool InventoryReader::read_sets() {
  const size_t num_sets = reader_.count(kLeastSetBytes);
  if (num_sets == 0) return damaged();
  sets_.reserve(num_sets);
  std::vector<RankRun> runs;
  for (size_t i = 0; i < num_sets; ++i) {
    RankSets::Id id = 0;
    if (!read_set(&runs) || !rank_sets_->intern_runs(runs, &id)) return damaged();
    sets_.push_back(id);
    if (rank_sets_->lowest(id) < rank_sets_->lowest(sets_[0])) return damaged();
    if (rank_sets_->highest(id) > rank_sets_->highest(sets_[0])) return damaged();
  }
  if (as_rank_.has_value()) {
    if (num_sets != 1 || !RankSets::is_single(sets_[0])) return damaged();
    sets_[0] = RankSets::single(*as_rank_);
  }
  lowest_rank_ = rank_sets_->lowest(sets_[0]);
  highest_rank_ = rank_sets_->highest(sets_[0]);
  return true;
}

bool InventoryReader::read_set(std::vector<RankRun>* runs) {
  runs->assign(reader_.count(kLeastRunBytes), RankRun{});
  uint64_t behind = 0;
  for (RankRun& run : *runs) {
    const uint64_t first = behind + reader_.u32();
    run.count = reader_.u32();
    run.step = run.count > 1 ? reader_.u32() : 0;
    const uint64_t last = first + uint64_t{run.step} * (uint64_t{run.count} - 1);
    if (!reader_.ok() || run.count == 0 || first >= kMaxRanks || last >= kMaxRanks) return false;
    run.first = static_cast<uint32_t>(first);
    behind = last + 1;
  }
  return reader_.ok();
}

bool InventoryReader::next() {
  if (entries_left_ == 0 || !reader_.ok()) return false;
  const bool is_first = entries_left_ == num_entries_;
  --entries_left_;
  const uint8_t flags = reader_.u8();
  Entry entry;
  entry.kind = static_cast<EntryKind>(flags & kKindMask);
  entry.requires_grad = (flags & kRequiresGrad) != 0;
  entry.pin_memory = (flags & kPinMemory) != 0;
  entry.can_split = (flags & kCanSplit) != 0;
  entry.memory_format = flags >> kMemoryFormatShift & 3;
  entry.first_rank = is_first ? lowest_rank_ : entry_.first_rank;
  entry.ordinal = is_first ? 0 : entry_.ordinal + 1;
  if ((flags & kFollows) == 0) {
    const uint32_t rank = reader_.u32();
    const uint32_t ordinal = reader_.u32();
    const bool is_behind = rank > entry.first_rank || (rank == entry.first_rank && ordinal > entry.ordinal);
    if (!is_behind || rank > highest_rank_) return damaged();
    entry.first_rank = rank;
    entry.ordinal = ordinal;
  } else if (!is_first && entry.ordinal == 0) {
    return damaged();
  }
  if (!read_shared(&fqn_) || !read_shared(&path_)) return damaged();
  entry.fqn_size = static_cast<uint32_t>(fqn_.size());
  entry.path_size = static_cast<uint32_t>(path_.size());
  entry_ = entry;
  boxes_read_ = 0;
  if (entry.is_tensor()) return read_tensor();
  sizes_.clear();
  entry_.num_boxes = 1;
  const bool has_properties = (flags & (kRequiresGrad | kPinMemory | kCanSplit)) != 0 || entry.memory_format != 0;
  return has_properties ? damaged() : reader_.ok();
}

bool InventoryReader::read_tensor() {
  entry_.dtype = static_cast<tensor::DType>(reader_.u8());
  entry_.num_dims = reader_.u8();
  if (entry_.kind > EntryKind::kShard || entry_.memory_format > 2 || entry_.num_dims > reader_.remaining()) {
    return damaged();
  }
  sizes_.resize(entry_.num_dims);
  for (int64_t& size : sizes_) size = reader_.i64();
  if (!reader_.ok() || !is_possible(entry_.dtype, sizes_.data(), sizes_.size())) return damaged();
  entry_.num_boxes = 1;
  if (entry_.kind == EntryKind::kShard) {
    entry_.num_boxes = static_cast<uint32_t>(reader_.count(2 * size_t{entry_.num_dims} + 1));
    if (entry_.num_boxes == 0) return damaged();
  }
  return reader_.ok();
}

bool InventoryReader::next_box() {
  if (entry_.kind == EntryKind::kShard) {
    box_before_.swap(box_);
    box_.resize(2 * size_t{entry_.num_dims});
    for (int64_t& number : box_) number = reader_.i64();
    const uint64_t before = position_;
    position_ = first_position(sizes_.data(), box_.data(), entry_.num_dims);
    if (boxes_read_ != 0) {
      if (position_ < before) return damaged();
      if (position_ == before && compare_boxes(box_before_.data(), box_.data(), entry_.num_dims) >= 0) return damaged();
    }
  }
  ++boxes_read_;
  const uint64_t set = reader_.number();
  if (!reader_.ok() || set >= sets_.size()) return damaged();
  holders_ = sets_[set];
  return true;
}

bool InventoryReader::read_shared(std::string* name) {
  const uint64_t shared = reader_.number();
  if (shared > name->size() || shared > kMaxShared) return damaged();
  const std::string_view rest = reader_.view(reader_.number());
  name->resize(shared);
  name->append(rest);
  return reader_.ok();
}

base::Status InventoryReader::end() {
  if (reader_.ok() && entries_left_ == 0 && reader_.remaining() == 0) return base::Status::ok();
  return base::Status::make(base::Code::kCorrupt, base::text("inventory: damaged at byte ", reader_.position(), " of ",
                                                             reader_.position() + reader_.remaining()));
}

}  // namespace bytecheckpoint::planner
