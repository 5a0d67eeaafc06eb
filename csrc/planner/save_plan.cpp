// SPDX-License-Identifier: Apache-2.0
#include "csrc/planner/save_plan.h"

#include <algorithm>
#include <numeric>

#include "csrc/planner/balance.h"
#include "csrc/planner/validate.h"

namespace bytecheckpoint::planner {

using base::Code;
using base::Status;
using base::text;

int64_t SavePlan::max_bytes() const {
  return rank_bytes.empty() ? 0 : *std::max_element(rank_bytes.begin(), rank_bytes.end());
}

int64_t SavePlan::total_bytes() const {
  return std::accumulate(rank_bytes.begin(), rank_bytes.end(), int64_t{0});
}

base::Result<SavePlan> plan_save(const Inventory& inventory, const SaveOptions& options) {
  if (options.min_part_bytes < 1) {
    return Status::make(Code::kInvalidArgument, text("min_part_bytes=", options.min_part_bytes, ": must be >= 1"));
  }
  const RankSets& sets = inventory.rank_sets;
  uint32_t num_ranks = 0;
  bool is_gapless = true;
  sets.for_each(inventory.ranks, [&](uint32_t rank) {
    if (rank == num_ranks) {
      ++num_ranks;
    } else {
      is_gapless = false;
    }
  });
  if (!is_gapless) {
    return Status::make(Code::kInvalidArgument,
                        text("inventory of ", sets.size(inventory.ranks), " ranks up to ",
                             sets.highest(inventory.ranks), ": rank ", num_ranks, " is missing"));
  }
  BCP_RETURN_IF_ERROR(validate_inventory(inventory, options.allow_gaps));
  return Balance(inventory, options, num_ranks).run();
}

std::vector<PlannedChunk> chunks_of(const Inventory& inventory, const SavePlan& plan, const Entry& entry) {
  std::vector<PlannedChunk> chunks;
  chunks.reserve(entry.num_boxes);
  for (uint32_t b = 0; b < entry.num_boxes; ++b) {
    const uint32_t writer = plan.writers[entry.boxes_begin + b];
    if (writer == SavePlan::kNobody) continue;
    if (!SavePlan::is_split(writer)) {
      chunks.push_back(PlannedChunk{writer, inventory.box(entry, b)});
      continue;
    }
    const uint32_t split = writer & ~SavePlan::kSplit;
    for (uint64_t p = plan.first_part[split]; p < plan.first_part[split + 1]; ++p) {
      chunks.push_back(PlannedChunk{plan.parts[p].rank, part_of_box(inventory, entry, b, plan.parts[p])});
    }
  }
  const auto is_before = [](const PlannedChunk& a, const PlannedChunk& b) { return a.rank < b.rank; };
  if (!std::is_sorted(chunks.begin(), chunks.end(), is_before)) {
    std::stable_sort(chunks.begin(), chunks.end(), is_before);
  }
  return chunks;
}

size_t row_dim(const int64_t* box_sizes, size_t num_dims) {
  return static_cast<size_t>(std::find_if(box_sizes, box_sizes + num_dims, [](int64_t size) { return size > 1; }) -
                             box_sizes);
}

tensor::Box part_of_box(const Inventory& inventory, const Entry& entry, size_t number, const Part& part) {
  tensor::Box box = inventory.box(entry, number);
  const size_t dim = row_dim(box.sizes.data(), box.sizes.size());
  box.offsets[dim] += part.first_row;
  box.sizes[dim] = part.num_rows;
  return box;
}

}  // namespace bytecheckpoint::planner
