// SPDX-License-Identifier: Apache-2.0
#include "csrc/planner/merge_inventories.h"

#include <algorithm>
#include <functional>
#include <numeric>
#include <optional>
#include <tuple>
#include <utility>

#include "csrc/planner/inventory_blob.h"
#include "csrc/planner/join_replicas.h"

namespace bytecheckpoint::planner {
namespace {

using base::Code;
using base::Status;
using base::text;

/// A blob, and the rank whose inventory it counts as; see InventoryReader::begin.
struct Source {
  std::string_view blob;
  std::optional<uint32_t> as_rank;
};

/// Where the next box of an entry is put.
struct Place {
  uint32_t* words;
  RankSets::Id* holders;
  const RankSets::Id* holders_end;
};

/// Blobs have one box each of very many entries, whose places are far apart, so each box would wait for memory. The
/// places of the entry that comes so many entries later are fetched in the meantime.
constexpr size_t kPrefetched = 8;

/// Sets the size. Numbers that were there are lost, so they are not copied if the array must grow.
template <class T>
void make_room(std::vector<T>* numbers, size_t size) {
  if (numbers->capacity() < size) std::vector<T>().swap(*numbers);
  numbers->resize(size);
}

/// Cuts off the end. Also gives back the memory if less than half is left, because an inventory that is kept keeps its
/// memory.
template <class T>
void shrink(std::vector<T>* numbers, size_t size) {
  const bool is_much = size < numbers->size() / 2;
  numbers->resize(size);
  if (is_much) numbers->shrink_to_fit();
}

/// Reads all blobs twice: to check them and count the boxes of each entry, then to put each box at its place. Reading
/// is cheaper than to keep the boxes until their places are known, which takes as much memory again.
///
/// If all ranks have as many boxes of each entry as the first one, as FSDP and DDP do, the places are known after the
/// first blob, and the others are read once. This is a guess until the last blob is read.
class Merger {
 public:
  /// \param sources  At least one; must outlive the object.
  explicit Merger(const std::vector<Source>& sources) : sources_(sources) {}

  /// Merges. May be called once.
  base::Result<Inventory> run();

 private:
  Status count_boxes();
  Status guess_places();
  bool is_guess_right(const std::vector<uint32_t>& order) const;
  Status add_entry(const InventoryReader& reader);
  uint32_t find_or_add(const InventoryReader& reader);
  Status join_properties(const InventoryReader& reader, Entry* entry);
  Status join_ranks();
  std::vector<uint32_t> order_of_entries() const;
  void lay_out(const std::vector<uint32_t>& order, size_t times);
  Place* find_place(uint32_t number, uint32_t num_boxes);
  void read_boxes(InventoryReader* reader, Place* place, Entry* entry);
  Status place_boxes(const Source& source, InventoryReader* reader);
  Status join_boxes();

  /// Returns how many words a box of the entry takes. Only shards have boxes of their own.
  static size_t words_of_box(const Entry& entry) {
    return entry.kind == EntryKind::kShard ? num_words(2 * size_t{entry.num_dims}, entry.is_wide) : 0;
  }

  const std::vector<Source>& sources_;
  // Has the entries in the order in which they were found, each with the number of its boxes in all blobs. `lay_out`
  // gives each entry room for all of them; joining replicas then moves everything to the left.
  Inventory found_;
  base::IndexTable names_;
  std::vector<uint32_t> numbers_;        // of the entries of the blob that is read, by position there
  std::vector<uint32_t> blob_of_entry_;  // number of the last blob that had the entry
  uint32_t num_blobs_ = 0;
  size_t num_boxes_ = 0;  // of all blobs
  std::vector<RankSets::Id> ranks_;
  std::vector<Place> places_;  // of each entry; none while they are not known
};

base::Result<Inventory> Merger::run() {
  BCP_RETURN_IF_ERROR(count_boxes());
  BCP_RETURN_IF_ERROR(join_ranks());
  const std::vector<uint32_t> order = order_of_entries();
  if (!is_guess_right(order)) {
    lay_out(order, 1);
    InventoryReader reader(&found_.rank_sets, sources_.size() > 1);
    for (const Source& source : sources_) BCP_RETURN_IF_ERROR(place_boxes(source, &reader));
  }
  std::vector<Entry> entries;
  entries.reserve(order.size());
  for (const uint32_t number : order) entries.push_back(found_.entries[number]);
  found_.entries = std::move(entries);
  BCP_RETURN_IF_ERROR(join_boxes());
  return std::move(found_);
}

/// Reads all blobs, checks them, and collects all but the boxes.
Status Merger::count_boxes() {
  InventoryReader reader(&found_.rank_sets, sources_.size() > 1);
  for (const auto& [blob, as_rank] : sources_) {
    if (as_rank.value_or(0) >= kMaxRanks) {
      return Status::make(Code::kInvalidArgument, text("rank ", *as_rank, ": must be below ", kMaxRanks));
    }
    BCP_RETURN_IF_ERROR(reader.begin(blob, as_rank));
    ++num_blobs_;
    ranks_.push_back(reader.ranks());
    while (reader.next()) {
      BCP_RETURN_IF_ERROR(add_entry(reader));
      const uint32_t number = numbers_[reader.position()];
      const uint32_t num_boxes = reader.entry().num_boxes;
      Entry& entry = found_.entries[number];
      read_boxes(&reader, find_place(number, num_boxes), &entry);
      num_boxes_ += num_boxes;
      entry.num_boxes += num_boxes;
    }
    BCP_RETURN_IF_ERROR(reader.end());
    if (num_blobs_ == 1) BCP_RETURN_IF_ERROR(guess_places());
  }
  if (num_boxes_ <= UINT32_MAX / 2) return Status::ok();
  return Status::make(Code::kInvalidArgument, text("the inventories have ", num_boxes_, " boxes, which are too many"));
}

/// Makes room for as many boxes of each entry in each blob as the first one has, and puts those there. Declines if this
/// takes much more memory than the blobs let expect.
Status Merger::guess_places() {
  size_t num_bytes = 0;
  for (const Source& source : sources_) num_bytes += source.blob.size();
  const size_t guessed_bytes = sources_[0].blob.size() * sources_.size();
  if (guessed_bytes > num_bytes + num_bytes / 8 || num_boxes_ > UINT32_MAX / 2 / sources_.size()) return Status::ok();
  std::vector<uint32_t> order(found_.entries.size());
  std::iota(order.begin(), order.end(), 0);
  lay_out(order, sources_.size());
  InventoryReader reader(&found_.rank_sets);
  return place_boxes(sources_[0], &reader);
}

/// Returns whether all boxes are at their places, which are in the order of the entries.
bool Merger::is_guess_right(const std::vector<uint32_t>& order) const {
  return !places_.empty() && num_boxes_ == found_.holders.size() && std::is_sorted(order.begin(), order.end());
}

Status Merger::add_entry(const InventoryReader& reader) {
  const uint32_t number = find_or_add(reader);
  if (blob_of_entry_[number] == num_blobs_) {
    return Status::make(Code::kCorrupt, text("inventory: '", reader.fqn(), "' is in it twice"));
  }
  blob_of_entry_[number] = num_blobs_;
  Entry& entry = found_.entries[number];
  const bool is_joined = reader.is_repeated() && reader.entry().first_rank >= entry.first_rank;
  return is_joined ? Status::ok() : join_properties(reader, &entry);
}

/// Returns the number of the reader's entry, and notes it in numbers_.
uint32_t Merger::find_or_add(const InventoryReader& reader) {
  if (reader.is_repeated()) return numbers_[reader.position()];
  const uint64_t hash = std::hash<std::string_view>()(reader.fqn());
  uint32_t number =
      names_.find(hash, [&](uint32_t index) { return found_.fqn(found_.entries[index]) == reader.fqn(); });
  if (number == base::IndexTable::kNone) {
    number = static_cast<uint32_t>(found_.entries.size());
    names_.insert(hash, number);
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
  numbers_.resize(reader.position());
  numbers_.push_back(number);
  return number;
}

Status Merger::join_properties(const InventoryReader& reader, Entry* entry) {
  const Entry& other = reader.entry();
  if (other.kind != entry->kind || other.dtype != entry->dtype || other.num_dims != entry->num_dims ||
      !std::equal(reader.sizes(), reader.sizes() + other.num_dims, found_.sizes(*entry))) {
    Inventory one;  // holds only the other rank's entry, for the message
    one.dims.assign(reader.sizes(), reader.sizes() + other.num_dims);
    Entry of_one = other;
    of_one.dims_begin = 0;
    std::string wanted = text("rank ", entry->first_rank, " has ", to_text(found_, *entry));
    std::string got = text("rank ", other.first_rank, " has ", to_text(one, of_one));
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

Status Merger::join_ranks() {
  found_.ranks = ranks_[0];
  if (ranks_.size() == 1) return Status::ok();
  std::vector<uint32_t> scratch;
  for (const RankSets::Id ranks : ranks_) unroll(found_.rank_sets, ranks, &scratch);
  std::sort(scratch.begin(), scratch.end());
  const auto twice = std::adjacent_find(scratch.begin(), scratch.end());
  if (twice != scratch.end()) {
    return Status::make(Code::kInvalidArgument, text("rank ", *twice, " is in two inventories"));
  }
  found_.ranks = found_.rank_sets.intern(scratch);
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

/// Gives each entry room for `times` its boxes.
void Merger::lay_out(const std::vector<uint32_t>& order, size_t times) {
  size_t words = 0, boxes = 0;
  for (const uint32_t number : order) {
    Entry& entry = found_.entries[number];
    entry.words_begin = words;
    entry.boxes_begin = static_cast<uint32_t>(boxes);
    words += times * entry.num_boxes * words_of_box(entry);
    boxes += times * entry.num_boxes;
  }
  make_room(&found_.box_words, words);
  make_room(&found_.holders, boxes);
  places_.clear();
  for (const Entry& e : found_.entries) {
    RankSets::Id* holders = found_.holders.data() + e.boxes_begin;
    places_.push_back({found_.box_words.data() + e.words_begin, holders, holders + times * e.num_boxes});
  }
}

/// Returns the place of the next boxes of an entry; null if it is not known. Places that were guessed are given up as
/// soon as one of them lacks room.
Place* Merger::find_place(uint32_t number, uint32_t num_boxes) {
  if (number + kPrefetched < places_.size()) {
    __builtin_prefetch(places_[number + kPrefetched].words, 1);
    __builtin_prefetch(places_[number + kPrefetched].holders, 1);
  }
  if (number < places_.size()) {
    Place& place = places_[number];
    if (num_boxes <= static_cast<size_t>(place.holders_end - place.holders)) return &place;
  }
  places_.clear();
  return nullptr;
}

/// Reads the boxes of the reader's entry. \param place  Where they are put; null to only check them.
void Merger::read_boxes(InventoryReader* reader, Place* place, Entry* entry) {
  const bool was_wide = entry->is_wide;
  const size_t num = words_of_box(*entry);
  const uint32_t num_boxes = reader->entry().num_boxes;
  for (uint32_t b = 0; b < num_boxes && reader->next_box(place == nullptr ? nullptr : place->words, was_wide); ++b) {
    entry->is_wide |= reader->is_wide();
    if (place == nullptr) continue;
    place->words += num;
    *place->holders++ = reader->box_holders();
  }
  if (entry->is_wide != was_wide) places_.clear();  // the place has room for narrow boxes only
}

/// Reads a blob that was checked before. The boxes of an entry stay in the order of the blobs.
Status Merger::place_boxes(const Source& source, InventoryReader* reader) {
  BCP_RETURN_IF_ERROR(reader->begin(source.blob, source.as_rank));
  while (reader->next()) {
    const uint32_t number = find_or_add(*reader);
    read_boxes(reader, find_place(number, reader->entry().num_boxes), &found_.entries[number]);
  }
  return reader->end();
}

/// Joins replicas to one box, and moves each entry to the end of the entry before it.
Status Merger::join_boxes() {
  ReplicaJoiner joiner(&found_.rank_sets);
  size_t words = 0, boxes = 0;
  for (Entry& entry : found_.entries) {
    FoundBoxes found;
    found.fqn = found_.fqn(entry);
    found.sizes = found_.sizes(entry);
    found.num_dims = entry.kind == EntryKind::kShard ? entry.num_dims : 0;
    found.is_wide = entry.is_wide;
    found.words = found_.box_words.data() + entry.words_begin;
    found.holders = found_.holders.data() + entry.boxes_begin;
    found.num_boxes = entry.num_boxes;
    entry.words_begin = words;
    entry.boxes_begin = static_cast<uint32_t>(boxes);
    BCP_ASSIGN_OR_RETURN(const size_t num_joined,
                         joiner.join(found, found_.box_words.data() + words, found_.holders.data() + boxes));
    entry.num_boxes = static_cast<uint32_t>(num_joined);
    words += num_joined * words_of_box(entry);
    boxes += num_joined;
  }
  shrink(&found_.box_words, words);
  shrink(&found_.holders, boxes);
  return Status::ok();
}

}  // namespace

base::Result<Inventory> merge_inventories(const std::vector<std::string_view>& blobs) {
  if (blobs.empty()) return Status::make(Code::kInvalidArgument, "no inventory to merge");
  std::vector<Source> sources;
  sources.reserve(blobs.size());
  for (const std::string_view blob : blobs) sources.push_back(Source{blob, std::nullopt});
  return Merger(sources).run();
}

base::Result<Inventory> merge_ranks(const std::vector<std::string_view>& blobs) {
  if (blobs.empty()) return Status::make(Code::kInvalidArgument, "no inventory to merge");
  std::vector<Source> sources;
  sources.reserve(blobs.size());
  for (const std::string_view blob : blobs) sources.push_back(Source{blob, static_cast<uint32_t>(sources.size())});
  return Merger(sources).run();
}

base::Result<Inventory> merge_below(std::string_view own, uint32_t rank, const std::vector<std::string_view>& below) {
  std::vector<Source> sources;
  sources.reserve(below.size() + 1);
  for (const std::string_view blob : below) sources.push_back(Source{blob, std::nullopt});
  sources.push_back(Source{own, rank});
  return Merger(sources).run();
}

base::Result<Inventory> decode_inventory(std::string_view blob) {
  return merge_inventories({blob});
}

}  // namespace bytecheckpoint::planner
