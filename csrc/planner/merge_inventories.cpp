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
};

/// Blobs have one box each of very many entries, whose places are far apart, so each box would wait for memory. The
/// places of the entry that comes so many entries later are fetched in the meantime.
constexpr size_t kPrefetched = 8;

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
class Merger {
 public:
  /// \param sources  At least one; must outlive the object.
  explicit Merger(const std::vector<Source>& sources) : sources_(sources) {}

  /// Merges. May be called once.
  base::Result<Inventory> run();

 private:
  Status count_boxes();
  Status add_entry(const InventoryReader& reader);
  uint32_t find_or_add(const InventoryReader& reader);
  Status join_properties(const InventoryReader& reader, Entry* entry);
  Status join_ranks();
  std::vector<uint32_t> order_of_entries() const;
  void lay_out(const std::vector<uint32_t>& order);
  Status place_boxes();
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
};

base::Result<Inventory> Merger::run() {
  BCP_RETURN_IF_ERROR(count_boxes());
  BCP_RETURN_IF_ERROR(join_ranks());
  const std::vector<uint32_t> order = order_of_entries();
  lay_out(order);
  BCP_RETURN_IF_ERROR(place_boxes());
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
      Entry& entry = found_.entries[numbers_[reader.position()]];
      const uint32_t num_boxes = reader.entry().num_boxes;
      for (uint32_t b = 0; b < num_boxes && reader.next_box(); ++b) entry.is_wide |= reader.is_wide();
      num_boxes_ += num_boxes;
      entry.num_boxes += num_boxes;
    }
    BCP_RETURN_IF_ERROR(reader.end());
  }
  if (num_boxes_ <= UINT32_MAX / 2) return Status::ok();
  return Status::make(Code::kInvalidArgument, text("the inventories have ", num_boxes_, " boxes, which are too many"));
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

/// Gives each entry room for its boxes of all blobs.
void Merger::lay_out(const std::vector<uint32_t>& order) {
  size_t words = 0, boxes = 0;
  for (const uint32_t number : order) {
    Entry& entry = found_.entries[number];
    entry.words_begin = words;
    entry.boxes_begin = static_cast<uint32_t>(boxes);
    words += entry.num_boxes * words_of_box(entry);
    boxes += entry.num_boxes;
  }
  found_.box_words.resize(words);
  found_.holders.resize(boxes);
}

/// Reads all blobs again. The boxes of an entry stay in the order of the blobs.
Status Merger::place_boxes() {
  std::vector<Place> places;
  places.reserve(found_.entries.size());
  for (const Entry& e : found_.entries) {
    places.push_back({found_.box_words.data() + e.words_begin, found_.holders.data() + e.boxes_begin});
  }
  InventoryReader reader(&found_.rank_sets, sources_.size() > 1);
  for (const auto& [blob, as_rank] : sources_) {
    BCP_RETURN_IF_ERROR(reader.begin(blob, as_rank));
    while (reader.next()) {
      const uint32_t number = find_or_add(reader);
      if (number + kPrefetched < places.size()) {
        __builtin_prefetch(places[number + kPrefetched].words, 1);
        __builtin_prefetch(places[number + kPrefetched].holders, 1);
      }
      Place& place = places[number];
      const Entry& entry = found_.entries[number];
      for (uint32_t b = 0; b < reader.entry().num_boxes && reader.next_box(place.words, entry.is_wide); ++b) {
        place.words += words_of_box(entry);
        *place.holders++ = reader.box_holders();
      }
    }
    BCP_RETURN_IF_ERROR(reader.end());
  }
  return Status::ok();
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
