// SPDX-License-Identifier: Apache-2.0
#include "csrc/planner/inventory_blob.h"

#include <algorithm>

#include "csrc/planner/box_order.h"
#include "csrc/planner/rank_set_codec.h"

namespace bytecheckpoint::planner {
namespace {

// blob    = version, sets, entries
// sets    = count, then the sets (rank_set_codec.h). Set 0 is the ranks whose inventory this is; the others follow in
//           the order of their first use.
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

constexpr size_t kLeastEntryBytes = 6;

void write_shared(std::string_view before, std::string_view name, base::VarintWriter* out) {
  const size_t limit = std::min({before.size(), name.size(), kMaxShared});
  const auto differs = std::mismatch(name.begin(), name.begin() + static_cast<std::ptrdiff_t>(limit), before.begin());
  const auto shared = static_cast<size_t>(differs.first - name.begin());
  out->number(shared);
  out->number(name.size() - shared);
  out->raw(name.substr(shared));
}

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
  BoxArray numbers;
  for (size_t b = 0; b < entry.num_boxes; ++b) {
    if (entry.kind == EntryKind::kShard) {
      const int64_t* box = inventory.box_dims(entry, b, &numbers);
      for (size_t i = 0; i < 2 * size_t{entry.num_dims}; ++i) out->number(static_cast<uint64_t>(box[i]));
    }
    out->number(sets->number(inventory.box_holders(entry, b)));
  }
}

}  // namespace

std::string encode_inventory(const Inventory& inventory) {
  // Sets are numbered first, so that they can be written first. Moving the entries behind them would take as much
  // memory again.
  SetNumbers sets;
  (void)sets.number(inventory.ranks);
  for (const RankSets::Id holders : inventory.holders) (void)sets.number(holders);
  base::VarintWriter out;
  out.u8(kInventoryVersion);
  out.number(sets.ids().size());
  for (const RankSets::Id id : sets.ids()) write_set(inventory.rank_sets, id, &out);
  out.number(inventory.entries.size());
  for (size_t i = 0; i < inventory.entries.size(); ++i) write_entry(inventory, i, &sets, &out);
  return out.take();
}

base::Status InventoryReader::begin(std::string_view blob, std::optional<uint32_t> as_rank) {
  reader_ = base::VarintReader(blob);
  num_entries_ = entries_left_ = 0;
  is_repeated_ = remembers_;
  if (reader_.u8() == kInventoryVersion && read_sets(as_rank)) {
    num_entries_ = entries_left_ = reader_.count(kLeastEntryBytes);
  } else {
    reader_.fail();
  }
  return reader_.ok() ? base::Status::ok() : end();
}

bool InventoryReader::read_sets(std::optional<uint32_t> as_rank) {
  const size_t num_sets = reader_.count(kLeastSetBytes);
  if (num_sets == 0) return damaged();
  sets_.clear();
  sets_.reserve(num_sets);
  for (size_t i = 0; i < num_sets; ++i) {
    RankSets::Id id = 0;
    if (!read_set(&reader_, rank_sets_, &id)) return damaged();
    sets_.push_back(id);
    if (rank_sets_->lowest(id) < rank_sets_->lowest(sets_[0])) return damaged();
    if (rank_sets_->highest(id) > rank_sets_->highest(sets_[0])) return damaged();
  }
  if (as_rank.has_value()) {
    if (num_sets != 1 || !RankSets::is_single(sets_[0])) return damaged();
    sets_[0] = RankSets::single(*as_rank);
  }
  lowest_rank_ = rank_sets_->lowest(sets_[0]);
  highest_rank_ = rank_sets_->highest(sets_[0]);
  return true;
}

bool InventoryReader::next() {
  if (entries_left_ == 0 || !reader_.ok()) return false;
  position_ = num_entries_ - entries_left_;
  --entries_left_;
  boxes_read_ = 0;
  is_repeated_ = is_repeated_ && repeat_head();
  if (!is_repeated_ && !read_head()) return false;
  return read_num_boxes();
}

/// Skips the head of the entry if it has the same bytes as the one at this position of the blob before. As all heads up
/// to here had, its names and numbers mean the same, too.
bool InventoryReader::repeat_head() {
  if (position_ >= heads_.size()) return false;
  Head& head = heads_[position_];
  const bool follows = (static_cast<uint8_t>(head.bytes[0]) & kFollows) != 0;
  if (!follows || !reader_.skip(head.bytes)) return false;
  head.entry.first_rank = lowest_rank_;
  return true;
}

bool InventoryReader::read_head() {
  if (remembers_) heads_.resize(position_);  // the others are not behind the same heads any more
  const Entry* before = position_ == 0 ? nullptr : &heads_.back().entry;
  text_.resize(before == nullptr ? 0 : before->path_begin + before->path_size);
  sizes_.resize(before == nullptr ? 0 : before->dims_begin + before->num_dims);
  const std::string_view bytes = reader_.rest();
  const uint8_t flags = reader_.u8();
  Entry entry;
  entry.kind = static_cast<EntryKind>(flags & kKindMask);
  entry.requires_grad = (flags & kRequiresGrad) != 0;
  entry.pin_memory = (flags & kPinMemory) != 0;
  entry.can_split = (flags & kCanSplit) != 0;
  entry.memory_format = flags >> kMemoryFormatShift & 3;
  if (!read_place(flags, before, &entry)) return damaged();
  entry.fqn_begin = text_.size();
  if (!read_shared(before == nullptr ? 0 : before->fqn_begin, before == nullptr ? 0 : before->fqn_size)) {
    return damaged();
  }
  entry.path_begin = text_.size();
  entry.fqn_size = static_cast<uint32_t>(entry.path_begin - entry.fqn_begin);
  if (!read_shared(before == nullptr ? 0 : before->path_begin, before == nullptr ? 0 : before->path_size)) {
    return damaged();
  }
  entry.path_size = static_cast<uint32_t>(text_.size() - entry.path_begin);
  entry.dims_begin = sizes_.size();
  if (entry.is_tensor()) {
    if (!read_tensor(&entry)) return false;
  } else if ((flags & (kRequiresGrad | kPinMemory | kCanSplit)) != 0 || entry.memory_format != 0) {
    return damaged();
  }
  keep_head(Head{bytes.substr(0, bytes.size() - reader_.remaining()), entry});
  return reader_.ok();
}

void InventoryReader::keep_head(Head head) {
  if (!remembers_) {
    heads_.clear();
    text_.erase(0, head.entry.fqn_begin);
    sizes_.erase(sizes_.begin(), sizes_.end() - head.entry.num_dims);
    head.entry.path_begin -= head.entry.fqn_begin;
    head.entry.fqn_begin = 0;
    head.entry.dims_begin = 0;
  }
  heads_.push_back(head);
}

/// Reads whose state dict the entry is from, and where it is there.
bool InventoryReader::read_place(uint8_t flags, const Entry* before, Entry* entry) {
  entry->first_rank = before == nullptr ? lowest_rank_ : before->first_rank;
  entry->ordinal = before == nullptr ? 0 : before->ordinal + 1;
  if ((flags & kFollows) != 0) return before == nullptr || entry->ordinal != 0;
  const uint32_t rank = reader_.u32();
  const uint32_t ordinal = reader_.u32();
  const bool is_behind = rank > entry->first_rank || (rank == entry->first_rank && ordinal > entry->ordinal);
  if (!is_behind || rank > highest_rank_) return false;
  entry->first_rank = rank;
  entry->ordinal = ordinal;
  return true;
}

bool InventoryReader::read_tensor(Entry* entry) {
  entry->dtype = static_cast<tensor::DType>(reader_.u8());
  entry->num_dims = reader_.u8();
  if (entry->kind > EntryKind::kShard || entry->memory_format > 2 || entry->num_dims > reader_.remaining()) {
    return damaged();
  }
  for (size_t d = 0; d < entry->num_dims; ++d) sizes_.push_back(reader_.i64());
  const bool is_valid = reader_.ok() && is_possible(entry->dtype, sizes_.data() + entry->dims_begin, entry->num_dims);
  return is_valid || damaged();
}

bool InventoryReader::read_num_boxes() {
  Entry& entry = heads_[remembers_ ? position_ : 0].entry;
  entry.num_boxes = 1;
  if (entry.kind == EntryKind::kShard) {
    entry.num_boxes = static_cast<uint32_t>(reader_.count(2 * size_t{entry.num_dims} + 1));
    if (entry.num_boxes == 0) return damaged();
    box_.resize(2 * size_t{entry.num_dims});
  }
  return reader_.ok();
}

bool InventoryReader::next_box(uint32_t* words, bool is_wide) {
  if (entry().kind == EntryKind::kShard && !read_box(words, is_wide)) return damaged();
  ++boxes_read_;
  const uint64_t set = reader_.number();
  if (!reader_.ok() || set >= sets_.size()) return damaged();
  holders_ = sets_[set];
  return true;
}

/// Reads the numbers of a box. \returns false if it does not come behind the box before.
bool InventoryReader::read_box(uint32_t* words, bool is_wide) {
  const size_t num_dims = entry().num_dims;
  const bool is_only = entry().num_boxes == 1;  // so that there is no order
  if (!is_only) box_before_.assign(box_.begin(), box_.end());
  base::VarintReader reader = reader_;  // a copy stays in registers, because nothing points to it
  int64_t bits = 0;
  for (int64_t& to : box_) {
    const int64_t number = reader.i64();
    to = number;
    bits |= number;
    if (words != nullptr) words = pack_numbers(&number, 1, is_wide, words);
  }
  reader_ = reader;
  box_bits_ = bits;
  if (is_only) return true;
  const uint64_t before = box_position_;
  box_position_ = first_position(sizes(), box_.data(), num_dims);
  if (boxes_read_ == 0) return true;
  return box_position_ > before ||
         (box_position_ == before && compare_boxes(box_before_.data(), box_.data(), num_dims) < 0);
}

/// Appends a name to text_. \param before  Where the name of the same kind of the entry before is.
bool InventoryReader::read_shared(uint64_t before, uint32_t before_size) {
  const uint64_t shared = reader_.number();
  if (shared > before_size || shared > kMaxShared) return false;
  const std::string_view rest = reader_.view(reader_.number());
  text_.append(text_, before, shared).append(rest);
  return reader_.ok();
}

base::Status InventoryReader::end() {
  if (reader_.ok() && entries_left_ == 0 && reader_.remaining() == 0) return base::Status::ok();
  return base::Status::make(base::Code::kCorrupt, base::text("inventory: damaged at byte ", reader_.position(), " of ",
                                                             reader_.position() + reader_.remaining()));
}

}  // namespace bytecheckpoint::planner
