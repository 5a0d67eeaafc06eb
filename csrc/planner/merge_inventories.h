// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <string_view>
#include <vector>

#include "csrc/base/status.h"
#include "csrc/planner/inventory.h"

namespace bytecheckpoint::planner {

/// Joins encoded inventories of different ranks into one: equal boxes of one entry become one box with all its holders.
///
/// Associative, and the order of the blobs is irrelevant: the inventories of a tree's inner nodes give what those of
/// its leaves would. Where ranks differ in requires_grad, pin_memory, memory format or path, the lowest rank's counts,
/// as in DCP; a tensor may be split if no rank objects.
///
/// \param blobs  One at least.
/// \returns kInvalidArgument if two ranks disagree about an entry's kind, dtype or sizes, naming both, or if a rank is
/// in two inventories; kCorrupt for damaged blobs. Pure; O(n log n) in boxes, O(n) where they come in rank order and
/// ranks hold ascending shards.
base::Result<Inventory> merge_inventories(const std::vector<std::string_view>& blobs);

/// The same for the inventories of ranks 0, 1, ..., of each of which only the order of `blobs` tells the number.
base::Result<Inventory> merge_ranks(const std::vector<std::string_view>& blobs);

/// The same at a node of a tree: its own inventory, of which only `rank` tells the number, and those of the nodes
/// below, which know theirs.
base::Result<Inventory> merge_below(std::string_view own, uint32_t rank, const std::vector<std::string_view>& below);

/// One encoded inventory. kCorrupt for damage; takes no memory beyond a small multiple of the blob.
base::Result<Inventory> decode_inventory(std::string_view blob);

}  // namespace bytecheckpoint::planner
