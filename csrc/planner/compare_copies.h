// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <string>
#include <utility>
#include <vector>

#include "csrc/base/status.h"
#include "csrc/planner/copies.h"
#include "csrc/planner/inventory.h"

namespace bytecheckpoint::planner {

/// An object or a plain tensor of which ranks hold different copies.
struct DifferingCopies {
  std::string fqn;
  std::string kind;                          // for messages: `a plain tensor, float32 [2, 3]`
  std::vector<std::vector<uint32_t>> ranks;  // those that hold equal copies together, the lowest rank first
};

/// What `compare_copies` found.
struct Comparison {
  std::vector<DifferingCopies> differing;  // in the order of the inventory
  /// For each rank of the inventory: which of its copies were found equal on several ranks, for `hashes_of_groups`.
  std::vector<std::string> groups;
};

/// Compares what ranks hold under the same key, and decides which of them may write it (`Inventory::writers`), so that
/// no tensor is mixed from copies that differ:
///
///     an object or a plain tensor     its copies are equal: any of its holders; else the lowest of them
///     boxes on meshes that share      torch does not keep these equal. If they are equal, the ranks of one mesh write
///     no rank                         all boxes of the tensor; meshes take turns, by bytes
///
/// Copies that nobody looked at count as equal.
///
/// \param known_differing  Keys of which copies have differed before, so that the lowest rank writes them in any case.
/// \returns kInvalidArgument if boxes of a sharded tensor differ, or if meshes divide it differently.
base::Result<Comparison> compare_copies(const Copies& copies, const std::vector<std::string>& known_differing,
                                        Inventory* inventory);

}  // namespace bytecheckpoint::planner
