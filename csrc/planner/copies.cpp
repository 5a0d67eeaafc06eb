// SPDX-License-Identifier: Apache-2.0
#include "csrc/planner/copies.h"

#include <algorithm>
#include <cstring>
#include <functional>
#include <map>
#include <tuple>

#include "csrc/base/bytes.h"
#include "csrc/planner/rank_set_codec.h"

namespace bytecheckpoint::planner {
namespace {

using base::Code;
using base::Status;
using base::text;

// copies = version, number of sets, the sets (rank_set_codec.h), number of variants, then for each variant: key and
//          checksum, fixed width; mesh, how, number of its set
constexpr uint8_t kCopiesVersion = 1;
constexpr uint8_t kWithCopies = 0xFF;  // no inventory begins with this byte
constexpr size_t kKeyBytes = 8;
constexpr size_t kChecksumBytes = 4;
constexpr size_t kLeastVariantBytes = kKeyBytes + kChecksumBytes + 3;

auto content_of(const HeldCopy& copy) {
  return std::tie(copy.key, copy.mesh, copy.how, copy.checksum);
}

template <class Number>
void write_fixed(Number number, base::VarintWriter* out) {
  out->raw({reinterpret_cast<const char*>(&number), sizeof number});
}

template <class Number>
Number read_fixed(base::VarintReader* reader) {
  Number number = 0;
  const std::string_view bytes = reader->view(sizeof number);
  if (bytes.size() == sizeof number) std::memcpy(&number, bytes.data(), sizeof number);
  return number;
}

Status damaged(const base::VarintReader& reader) {
  return Status::make(Code::kCorrupt, text("copies of ranks: damaged at byte ", reader.position(), " of ",
                                           reader.position() + reader.remaining()));
}

Status read_copies(const EncodedCopies& encoded, Copies* to) {
  base::VarintReader reader(encoded.bytes);
  if (reader.u8() != kCopiesVersion) return damaged(reader);
  std::vector<RankSets::Id> sets(reader.count(kLeastSetBytes));
  for (RankSets::Id& id : sets) {
    if (!read_set(&reader, &to->rank_sets, &id)) return damaged(reader);
    if (!encoded.as_rank.has_value()) continue;
    if (!RankSets::is_single(id) || sets.size() != 1) return damaged(reader);
    id = RankSets::single(*encoded.as_rank);
  }
  for (size_t left = reader.count(kLeastVariantBytes); left > 0; --left) {
    Copies::Variant variant;
    variant.copy.key = read_fixed<uint64_t>(&reader);
    variant.copy.checksum = read_fixed<uint32_t>(&reader);
    variant.copy.mesh = reader.u32();
    variant.copy.how = reader.u32();
    const uint64_t set = reader.number();
    if (!reader.ok() || set >= sets.size()) return damaged(reader);
    variant.ranks = sets[set];
    to->variants.push_back(variant);
  }
  return reader.ok() && reader.remaining() == 0 ? Status::ok() : damaged(reader);
}

/// Joins sets of ranks. Few combinations of sets occur, so each is joined once.
class SetUnion {
 public:
  explicit SetUnion(RankSets* sets) : sets_(sets) {}

  RankSets::Id of(const std::vector<RankSets::Id>& ids) {
    if (ids.size() == 1) return ids[0];
    const auto [known, is_new] = known_.try_emplace(ids, 0);
    if (is_new) {
      std::vector<uint32_t> ranks;
      for (const RankSets::Id id : ids) sets_->for_each(id, [&](uint32_t rank) { ranks.push_back(rank); });
      std::sort(ranks.begin(), ranks.end());
      ranks.erase(std::unique(ranks.begin(), ranks.end()), ranks.end());
      known->second = sets_->intern(ranks);
    }
    return known->second;
  }

 private:
  RankSets* sets_;
  std::map<std::vector<RankSets::Id>, RankSets::Id> known_;
};

}  // namespace

uint64_t key_of_copy(std::string_view fqn, const int64_t* box, size_t num_dims) {
  uint64_t key = base::spread_hash(std::hash<std::string_view>()(fqn) + num_dims);
  for (size_t i = 0; i < 2 * num_dims; ++i) key = base::spread_hash(key ^ static_cast<uint64_t>(box[i]));
  return key;
}

void sort_copies(std::vector<HeldCopy>* copies) {
  std::sort(copies->begin(), copies->end(),
            [](const HeldCopy& a, const HeldCopy& b) { return content_of(a) < content_of(b); });
}

std::string encode_copies(const std::vector<HeldCopy>& copies) {
  Copies of_rank;
  for (const HeldCopy& copy : copies) of_rank.variants.push_back({copy, RankSets::single(0)});
  return encode_copies(of_rank);
}

std::string encode_copies(const Copies& copies) {
  SetNumbers sets;
  for (const Copies::Variant& variant : copies.variants) (void)sets.number(variant.ranks);
  base::VarintWriter out;
  out.u8(kCopiesVersion);
  out.number(sets.ids().size());
  for (const RankSets::Id id : sets.ids()) write_set(copies.rank_sets, id, &out);
  out.number(copies.variants.size());
  for (const Copies::Variant& variant : copies.variants) {
    write_fixed(variant.copy.key, &out);
    write_fixed(variant.copy.checksum, &out);
    out.number(variant.copy.mesh);
    out.number(variant.copy.how);
    out.number(sets.number(variant.ranks));
  }
  return out.take();
}

std::string join_message(std::string_view inventory, std::string_view copies) {
  base::VarintWriter out;
  if (copies.empty()) {
    out.raw(inventory);
    return out.take();
  }
  out.u8(kWithCopies);
  out.number(inventory.size());
  out.raw(inventory);
  out.raw(copies);
  return out.take();
}

std::pair<std::string_view, std::string_view> split_message(std::string_view message) {
  base::VarintReader reader(message);
  if (reader.u8() != kWithCopies) return {message, {}};
  const std::string_view inventory = reader.view(reader.number());
  if (!reader.ok()) return {message, {}};
  return {inventory, reader.rest()};
}

base::Result<Copies> decode_copies(const EncodedCopies& encoded) {
  Copies copies;
  BCP_RETURN_IF_ERROR(read_copies(encoded, &copies));
  return copies;
}

base::Result<Copies> merge_copies(const std::vector<EncodedCopies>& encoded) {
  Copies all;
  for (const EncodedCopies& one : encoded) BCP_RETURN_IF_ERROR(read_copies(one, &all));
  auto& variants = all.variants;
  std::sort(variants.begin(), variants.end(), [](const Copies::Variant& a, const Copies::Variant& b) {
    return std::tuple_cat(content_of(a.copy), std::tie(a.ranks)) <
           std::tuple_cat(content_of(b.copy), std::tie(b.ranks));
  });
  SetUnion joined(&all.rank_sets);
  std::vector<RankSets::Id> sets;
  size_t kept = 0;
  for (size_t first = 0, last = 0; first < variants.size(); first = last) {
    sets.clear();
    for (; last < variants.size() && content_of(variants[last].copy) == content_of(variants[first].copy); ++last) {
      sets.push_back(variants[last].ranks);
    }
    variants[kept++] = {variants[first].copy, joined.of(sets)};
  }
  variants.resize(kept);
  std::sort(variants.begin(), variants.end(), [&](const Copies::Variant& a, const Copies::Variant& b) {
    const uint32_t lowest_a = all.rank_sets.lowest(a.ranks), lowest_b = all.rank_sets.lowest(b.ranks);
    return std::tie(a.copy.key, lowest_a) < std::tie(b.copy.key, lowest_b);
  });
  return all;
}

base::Result<std::string> hashes_of_groups(const std::vector<HeldCopy>& copies, std::string_view groups) {
  base::VarintReader reader(groups);
  std::map<uint32_t, uint64_t> hashes;
  size_t position = 0;
  while (reader.ok() && reader.remaining() > 0) {
    const uint64_t count = reader.number();
    const uint32_t group = reader.u32();
    if (!reader.ok() || count > copies.size() - position) return damaged(reader);
    for (const size_t end = position + count; position < end; ++position) {
      if (group == 0) continue;
      uint64_t& hash = hashes[group];
      hash = base::spread_hash(hash ^ copies[position].how);
      hash = base::spread_hash(hash ^ copies[position].checksum);
    }
  }
  if (!reader.ok() || position != copies.size()) return damaged(reader);
  base::ByteWriter out;
  for (const auto& [group, hash] : hashes) {
    out.u32(group);
    out.u64(hash);
  }
  return out.take();
}

}  // namespace bytecheckpoint::planner
