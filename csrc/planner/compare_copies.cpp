// SPDX-License-Identifier: Apache-2.0
#include "csrc/planner/compare_copies.h"

#include <algorithm>
#include <map>
#include <set>
#include <unordered_map>

#include "csrc/base/varint.h"

namespace bytecheckpoint::planner {
namespace {

using base::Code;
using base::Status;
using base::text;

using Variants = std::pair<const Copies::Variant*, const Copies::Variant*>;  // begin and end: those of one key

/// Messages name so many keys.
constexpr size_t kMostNamed = 4;

/// Returns whether copies of one key differ. Copies on one mesh count as equal, because torch keeps them so.
bool any_differ(Variants variants) {
  struct Seen {
    const HeldCopy* first;
    bool has_other_checksum = false, has_other_mesh = false;
  };
  std::vector<Seen> seen;  // of each way to look at a copy; there is mostly one
  for (const Copies::Variant* variant = variants.first; variant != variants.second; ++variant) {
    const HeldCopy& copy = variant->copy;
    if (copy.how == HeldCopy::kNothing) continue;
    const auto same = std::find_if(seen.begin(), seen.end(), [&](const Seen& s) { return s.first->how == copy.how; });
    if (same == seen.end()) {
      seen.push_back({&copy});
      continue;
    }
    same->has_other_checksum |= copy.checksum != same->first->checksum;
    same->has_other_mesh |= copy.mesh == 0 || copy.mesh != same->first->mesh;
  }
  return std::any_of(seen.begin(), seen.end(), [](const Seen& s) { return s.has_other_checksum && s.has_other_mesh; });
}

class CopyComparison {
 public:
  CopyComparison(const Copies& copies, const std::vector<std::string>& known_differing, Inventory* inventory)
      : copies_(copies), known_differing_(known_differing.begin(), known_differing.end()), inventory_(*inventory) {}

  base::Result<Comparison> run();

 private:
  void find_keys_of_several();
  Variants of(uint64_t key) const;
  uint64_t key_of(const Entry& entry, size_t number) const;
  void compare_whole(const Entry& entry);
  Status compare_boxes(const Entry& entry);
  Status choose_mesh(const Entry& entry, const std::vector<Variants>& boxes);
  std::vector<std::vector<uint32_t>> ranks_of(Variants variants) const;
  void restrict_writers(uint32_t box, const std::vector<uint32_t>& ascending);
  void note_groups();
  Status refuse_differing_boxes() const;
  std::string ranks_text(Variants variants) const;

  const Copies& copies_;
  const std::set<std::string, std::less<>> known_differing_;
  Inventory& inventory_;
  std::unordered_map<uint64_t, Variants> several_;  // by key: copies of more than one variant
  std::set<uint64_t> differing_keys_;               // no longer compared while the plan is kept
  std::map<uint32_t, int64_t> bytes_of_mesh_;       // of tensors that each mesh was chosen for
  std::vector<std::string> refused_;
  Comparison found_;
};

base::Result<Comparison> CopyComparison::run() {
  find_keys_of_several();
  if (!several_.empty() || !known_differing_.empty()) {
    for (const Entry& entry : inventory_.entries) {
      if (entry.kind != EntryKind::kShard) {
        compare_whole(entry);
      } else if (!several_.empty()) {
        BCP_RETURN_IF_ERROR(compare_boxes(entry));
      }
    }
  }
  BCP_RETURN_IF_ERROR(refuse_differing_boxes());
  note_groups();
  return std::move(found_);
}

void CopyComparison::find_keys_of_several() {
  const auto* const end = copies_.variants.data() + copies_.variants.size();
  for (const Copies::Variant *first = copies_.variants.data(), *last = first; first != end; first = last) {
    while (last != end && last->copy.key == first->copy.key) ++last;
    if (last - first > 1) several_.emplace(first->copy.key, Variants(first, last));
  }
}

Variants CopyComparison::of(uint64_t key) const {
  const auto found = several_.find(key);
  return found == several_.end() ? Variants() : found->second;
}

uint64_t CopyComparison::key_of(const Entry& entry, size_t number) const {
  BoxArray box;
  return key_of_copy(inventory_.fqn(entry), inventory_.box_dims(entry, number, &box), entry.num_dims);
}

void CopyComparison::compare_whole(const Entry& entry) {
  const RankSets::Id holders = inventory_.box_holders(entry, 0);
  if (RankSets::is_single(holders)) return;
  const uint64_t key = key_of(entry, 0);
  const Variants variants = of(key);
  const bool differs = any_differ(variants);
  if (!differs && known_differing_.find(inventory_.fqn(entry)) == known_differing_.end()) return;
  differing_keys_.insert(key);
  restrict_writers(entry.boxes_begin, {inventory_.rank_sets.lowest(holders)});
  if (!differs) return;
  found_.differing.push_back({std::string(inventory_.fqn(entry)), to_text(inventory_, entry), ranks_of(variants)});
}

/// Returns the ranks of each variant. Variants of which nothing was looked at, or other bytes, stand for themselves.
std::vector<std::vector<uint32_t>> CopyComparison::ranks_of(Variants variants) const {
  std::vector<std::vector<uint32_t>> ranks;
  for (const Copies::Variant* variant = variants.first; variant != variants.second; ++variant) {
    ranks.emplace_back();
    copies_.rank_sets.for_each(variant->ranks, [&](uint32_t rank) { ranks.back().push_back(rank); });
  }
  return ranks;
}

Status CopyComparison::compare_boxes(const Entry& entry) {
  std::vector<Variants> boxes;
  bool is_on_several_meshes = false;
  for (size_t b = 0; b < entry.num_boxes; ++b) {
    if (RankSets::is_single(inventory_.box_holders(entry, b))) {
      boxes.emplace_back();
      continue;
    }
    const uint64_t key = key_of(entry, b);
    const Variants variants = of(key);
    boxes.push_back(variants);
    if (any_differ(variants)) {
      differing_keys_.insert(key);
      if (refused_.size() < kMostNamed) {
        refused_.push_back(text("'", inventory_.fqn(entry), "' (", ranks_text(variants), ")"));
      }
      return Status::ok();
    }
    is_on_several_meshes |= std::any_of(variants.first, variants.second, [&](const Copies::Variant& variant) {
      return variant.copy.mesh != variants.first->copy.mesh;
    });
  }
  return is_on_several_meshes ? choose_mesh(entry, boxes) : Status::ok();
}

/// Lets the ranks of one mesh write all boxes.
Status CopyComparison::choose_mesh(const Entry& entry, const std::vector<Variants>& boxes) {
  struct Mesh {
    size_t num_boxes = 0;
    std::vector<std::vector<uint32_t>> ranks;  // of each box
  };
  std::map<uint32_t, Mesh> meshes;
  int64_t bytes = 0;
  std::vector<uint32_t> holders;
  for (size_t b = 0; b < boxes.size(); ++b) {
    bytes += inventory_.box_bytes(entry, b);
    holders.clear();
    inventory_.rank_sets.for_each(inventory_.box_holders(entry, b), [&](uint32_t rank) { holders.push_back(rank); });
    for (const Copies::Variant* variant = boxes[b].first; variant != boxes[b].second; ++variant) {
      Mesh& mesh = meshes[variant->copy.mesh];
      mesh.ranks.resize(boxes.size());
      const bool is_first = mesh.ranks[b].empty();
      copies_.rank_sets.for_each(variant->ranks, [&](uint32_t rank) {
        if (std::binary_search(holders.begin(), holders.end(), rank)) mesh.ranks[b].push_back(rank);
      });
      mesh.num_boxes += is_first && !mesh.ranks[b].empty() ? 1 : 0;
    }
  }
  const auto lowest = [](const Mesh& mesh) { return *std::min_element(mesh.ranks[0].begin(), mesh.ranks[0].end()); };
  const Mesh* chosen = nullptr;
  int64_t* load = nullptr;
  for (const auto& [name, mesh] : meshes) {
    if (mesh.num_boxes < boxes.size()) continue;
    int64_t& own = bytes_of_mesh_[name];
    if (chosen == nullptr || own < *load || (own == *load && lowest(mesh) < lowest(*chosen))) {
      chosen = &mesh;
      load = &own;
    }
  }
  if (chosen == nullptr) {
    return Status::make(Code::kInvalidArgument,
                        text("'", inventory_.fqn(entry), "': ", to_text(inventory_, entry),
                             ": several device meshes that share no rank hold parts of it, and none of them holds all "
                             "that the others do. Give each mesh its own key"));
  }
  *load += bytes;
  for (size_t b = 0; b < boxes.size(); ++b) {
    std::vector<uint32_t> ranks = chosen->ranks[b];
    std::sort(ranks.begin(), ranks.end());
    restrict_writers(entry.boxes_begin + static_cast<uint32_t>(b), ranks);
  }
  return Status::ok();
}

void CopyComparison::restrict_writers(uint32_t box, const std::vector<uint32_t>& ascending) {
  if (inventory_.writers.empty()) inventory_.writers = inventory_.holders;
  inventory_.writers[box] = inventory_.rank_sets.intern(ascending);
}

std::string CopyComparison::ranks_text(Variants variants) const {
  std::string out;
  size_t num_named = 0;
  for (const std::vector<uint32_t>& ranks : ranks_of(variants)) {
    if (++num_named > kMostNamed) return out + " and others";
    const bool is_run = ranks.size() > 1 && ranks.back() - ranks.front() == ranks.size() - 1;
    out += text(out.empty() ? "" : " against ", ranks.size() > 1 ? "ranks " : "rank ", ranks.front());
    if (is_run) {
      out += text(" to ", ranks.back());
    } else {
      for (size_t i = 1; i < std::min(ranks.size(), kMostNamed); ++i) out += text(", ", ranks[i]);
      if (ranks.size() > kMostNamed) out += ", ...";
    }
  }
  return out;
}

Status CopyComparison::refuse_differing_boxes() const {
  if (refused_.empty()) return Status::ok();
  std::string keys;
  for (const std::string& key : refused_) keys += text(keys.empty() ? "" : ", ", key);
  return Status::make(
      Code::kInvalidArgument,
      text(
          "ranks hold different sharded tensors under the same key, and nothing keeps these equal: their device meshes "
          "or groups share no rank: ",
          keys, refused_.size() == kMostNamed ? " and maybe more" : "",
          ". Give each its own key: experts and pipeline stages that each rank counts from 0 need the number of the "
          "expert or of the stage in it. If they are replicas, make them equal before the save; or "
          "Config(differing_copies=\"trust\") saves those of one mesh and compares nothing"));
}

/// Notes which copies were found equal on several ranks. Whether they still are can be told by one hash of each group.
void CopyComparison::note_groups() {
  struct Runs {
    base::VarintWriter out;
    uint64_t count = 0;
    uint32_t group = 0;

    void end() {
      if (count == 0) return;
      out.number(count);
      out.number(group);
    }
  };
  std::vector<Runs> of_rank(inventory_.rank_sets.highest(inventory_.ranks) + 1);
  std::map<std::vector<RankSets::Id>, uint32_t> numbers;
  std::vector<RankSets::Id> sets;
  const auto& variants = copies_.variants;
  for (size_t first = 0, last = 0; first < variants.size(); first = last) {
    sets.clear();
    bool are_alike = true, is_one_mesh = variants[first].copy.mesh != 0;
    for (; last < variants.size() && variants[last].copy.key == variants[first].copy.key; ++last) {
      const HeldCopy& copy = variants[last].copy;
      are_alike = are_alike && copy.how == variants[first].copy.how && copy.checksum == variants[first].copy.checksum;
      is_one_mesh = is_one_mesh && copy.mesh == variants[first].copy.mesh;
      sets.push_back(variants[last].ranks);
    }
    const bool is_several = sets.size() > 1 || !RankSets::is_single(sets[0]);
    uint32_t group = 0;
    if (is_several && are_alike && !is_one_mesh && variants[first].copy.how != HeldCopy::kNothing &&
        differing_keys_.count(variants[first].copy.key) == 0) {
      group = numbers.try_emplace(sets, static_cast<uint32_t>(numbers.size() + 1)).first->second;
    }
    for (const RankSets::Id id : sets) {
      copies_.rank_sets.for_each(id, [&](uint32_t rank) {
        if (rank >= of_rank.size()) return;
        Runs& runs = of_rank[rank];
        if (runs.group != group) {
          runs.end();
          runs.group = group;
          runs.count = 0;
        }
        ++runs.count;
      });
    }
  }
  for (Runs& runs : of_rank) {
    runs.end();
    found_.groups.push_back(runs.out.take());
  }
}

}  // namespace

base::Result<Comparison> compare_copies(const Copies& copies, const std::vector<std::string>& known_differing,
                                        Inventory* inventory) {
  return CopyComparison(copies, known_differing, inventory).run();
}

}  // namespace bytecheckpoint::planner
