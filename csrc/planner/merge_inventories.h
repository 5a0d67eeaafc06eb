// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <string_view>
#include <vector>

#include "csrc/base/status.h"
#include "csrc/planner/inventory.h"

namespace bytecheckpoint::planner {

/// Joins the encoded inventories of different ranks into one. Equal boxes of an entry become one box with all its
/// holders.
///
/// Associative, and independent of the order of the blobs: merging the results of inner nodes of a tree gives the same
/// as merging all its leaves. Where ranks differ in requires_grad, pin_memory, memory format or path, the lowest rank
/// counts, as in DCP. A tensor may be split only if no rank forbids it.
///
/// \param blobs  At least one.
/// \returns kInvalidArgument if two ranks disagree about the kind, dtype or sizes of an entry (the message names both),
/// or if a rank is in two inventories; kCorrupt for damaged blobs.
/// Pure. O(n log n) in boxes; O(n) if the blobs come in rank order and ranks hold ascending shards.
base::Result<Inventory> merge_inventories(const std::vector<std::string_view>& blobs);

/// Does the same for the inventories of ranks 0, 1, ...: blob i is that of rank i, whatever rank it names.
base::Result<Inventory> merge_ranks(const std::vector<std::string_view>& blobs);

/// Does the same at a node of a tree: merges its own inventory, which counts as that of `rank` whatever rank it names,
/// with those of the nodes below it, which name their ranks correctly.
base::Result<Inventory> merge_below(std::string_view own, uint32_t rank, const std::vector<std::string_view>& below);

/// Decodes one inventory. \returns kCorrupt for damage. Takes no more memory than a small multiple of the blob.
base::Result<Inventory> decode_inventory(std::string_view blob);

}  // namespace bytecheckpoint::planner
