// SPDX-License-Identifier: Apache-2.0
#include "csrc/bridge/global_plan.h"

#include <utility>

#include "csrc/engine/coverage.h"
#include "csrc/planner/rank_assignment.h"

namespace bytecheckpoint::bridge {
namespace {

using format::Tree;

/// Makes DCP's planner data of a flattened state: FQN to the path through nested dicts.
base::Result<Tree> mappings_of(const planner::Inventory& inventory) {
  base::ByteWriter mappings;
  format::encode_container(Tree::Kind::kDict, 2 * inventory.entries.size(), &mappings);
  for (const planner::Entry& entry : inventory.entries) {
    const std::string_view fqn = inventory.fqn(entry);
    format::encode_text(Tree::Kind::kString, fqn, &mappings);
    if (entry.path_size == 0) {
      format::encode_container(Tree::Kind::kTuple, 1, &mappings);
      format::encode_text(Tree::Kind::kString, fqn, &mappings);
    } else {
      BCP_ASSIGN_OR_RETURN(const Tree path, format::decode_tree(inventory.path(entry)));
      mappings.raw(path.bytes());
    }
  }
  return Tree::from_encoded(mappings.take());
}

/// \param rank_items  Incremented for each rank that writes a chunk of the entry.
format::Item item_of(const planner::Inventory& inventory, const planner::SavePlan& plan, const planner::Entry& entry,
                     std::vector<size_t>* rank_items) {
  format::Item item;
  item.fqn = inventory.fqn(entry);
  item.is_tensor = entry.is_tensor();
  if (!item.is_tensor) {
    item.chunks.emplace_back();
    ++(*rank_items)[plan.writers[entry.boxes_begin]];
    return item;
  }
  item.tensor = inventory.info(entry);
  for (planner::PlannedChunk& chunk : planner::chunks_of(inventory, plan, entry)) {
    ++(*rank_items)[chunk.rank];
    item.chunks.push_back({std::move(chunk.box), {}});
  }
  return item;
}

}  // namespace

base::Result<GlobalPlan> plan_inventory(const planner::Inventory& inventory, planner::SaveOptions options,
                                        bool is_nested, engine::Gaps gaps) {
  options.allow_gaps = gaps != engine::Gaps::kRefuse;
  BCP_ASSIGN_OR_RETURN(planner::SavePlan plan, planner::plan_save(inventory, options));
  GlobalPlan global;
  global.assignments = planner::encode_assignments(inventory, plan);
  format::Manifest& manifest = global.manifest;
  global.rank_items.resize(plan.rank_bytes.size());
  manifest.items.reserve(inventory.entries.size());
  engine::CoverageCheck coverage;
  for (const uint32_t number : inventory.by_name()) {
    manifest.items.push_back(item_of(inventory, plan, inventory.entries[number], &global.rank_items));
    manifest.items.back().ordinal = number;
    if (gaps == engine::Gaps::kMark) BCP_RETURN_IF_ERROR(coverage.check(gaps, &manifest.items.back()));
  }
  if (is_nested) {
    BCP_ASSIGN_OR_RETURN(manifest.planner_data, mappings_of(inventory));
  }
  global.rank_bytes = std::move(plan.rank_bytes);
  return global;
}

}  // namespace bytecheckpoint::bridge
