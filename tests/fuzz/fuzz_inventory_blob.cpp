// SPDX-License-Identifier: Apache-2.0
#include "csrc/planner/inventory_blob.h"

#include "csrc/planner/merge_inventories.h"
#include "csrc/planner/validate.h"
#include "tests/fuzz/peak_memory.h"
#include "tests/fuzz/targets.h"

namespace bytecheckpoint::fuzz {
namespace {

using namespace planner;  // NOLINT

/// Names share prefixes, and numbers of one byte take eight.
constexpr int64_t kMaxTimesOfInventory = 256;

/// The reader alone keeps one entry at a time in memory.
std::string check_reader(std::string_view blob) {
  PeakMemory memory(blob.size());
  RankSets sets;
  InventoryReader reader(&sets);
  if (!reader.begin(blob).is_ok()) return memory.stop();
  while (reader.next()) {
    BCP_HOLDS(reader.entry().fqn_size == reader.fqn().size());
    for (uint32_t b = 0; b < reader.entry().num_boxes; ++b) {
      if (!reader.next_box()) break;
    }
  }
  (void)reader.end();
  return memory.stop();
}

}  // namespace

/// A decoded inventory encodes to bytes that decode to the same inventory.
std::string inventory_blob(std::string_view bytes) {
  BCP_ALL_HOLD(check_reader(bytes));
  PeakMemory memory(bytes.size(), kMaxTimesOfInventory);
  const auto decoded = decode_inventory(bytes);
  BCP_ALL_HOLD(memory.stop());
  if (!decoded.is_ok()) {
    BCP_HOLDS(decoded.status().code() == base::Code::kCorrupt);
    return {};
  }
  const Inventory& inventory = decoded.value();
  for (const Entry& entry : inventory.entries) {
    BCP_HOLDS(inventory.fqn(entry).size() == entry.fqn_size && inventory.path(entry).size() == entry.path_size);
    BCP_HOLDS(entry.boxes_begin + entry.num_boxes <= inventory.num_boxes());
    if (entry.is_tensor()) BCP_HOLDS(is_possible(entry.dtype, inventory.sizes(entry), entry.num_dims));
  }
  (void)validate_inventory(inventory);
  const std::string once = encode_inventory(inventory);
  const auto again = decode_inventory(once);
  BCP_HOLDS(again.is_ok() && encode_inventory(again.value()) == once);
  return {};
}

}  // namespace bytecheckpoint::fuzz
