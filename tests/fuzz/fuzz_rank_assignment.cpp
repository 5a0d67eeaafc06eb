// SPDX-License-Identifier: Apache-2.0
#include "csrc/planner/rank_assignment.h"

#include "csrc/planner/merge_inventories.h"
#include "csrc/planner/validate.h"
#include "tests/fuzz/peak_memory.h"
#include "tests/fuzz/targets.h"
#include "tests/fuzz/two_parts.h"

namespace bytecheckpoint::fuzz {

using namespace planner;  // NOLINT

/// Two parts: an inventory and an assignment. A rank holds everything that it must write, and writes it once.
std::string rank_assignment(std::string_view bytes) {
  const auto [blob, assignment] = TwoParts::of(bytes);
  const auto local = decode_inventory(blob);
  if (!local.is_ok() || !validate_inventory(local.value()).is_ok()) return {};
  const Inventory& inventory = local.value();
  PeakMemory memory(assignment.size() + sizeof(Entry) * inventory.entries.size() + 8 * inventory.dims.size() +
                    4 * inventory.num_boxes());
  const auto applied = apply_assignment(inventory, assignment);
  BCP_ALL_HOLD(memory.stop());
  if (!applied.is_ok()) {
    const base::Code code = applied.status().code();
    BCP_HOLDS(code == base::Code::kCorrupt || code == base::Code::kInvalidArgument);
    return {};
  }
  const PlannedWrite* before = nullptr;
  for (const PlannedWrite& write : applied.value()) {
    BCP_HOLDS(write.entry < inventory.entries.size());
    const Entry& entry = inventory.entries[write.entry];
    BCP_HOLDS(write.number < entry.num_boxes && write.box.num_dims() == entry.num_dims);
    BCP_HOLDS(before == nullptr || before->entry < write.entry ||
              (before->entry == write.entry && before->number < write.number));
    const tensor::Box held = inventory.box(entry, write.number);
    for (size_t d = 0; d < entry.num_dims; ++d) {
      BCP_HOLDS(write.box.offsets[d] >= held.offsets[d] && write.box.sizes[d] <= held.sizes[d]);
      BCP_HOLDS(write.box.offsets[d] + write.box.sizes[d] <= held.offsets[d] + held.sizes[d]);
    }
    before = &write;
  }
  return {};
}

}  // namespace bytecheckpoint::fuzz
