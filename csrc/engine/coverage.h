// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <map>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "csrc/base/status.h"
#include "csrc/format/manifest/manifest.h"
#include "csrc/planner/coverage.h"

namespace bytecheckpoint::engine {

/// What a save does about a tensor whose chunks leave a gap.
enum class Gaps : uint8_t {
  kRefuse,  // the save fails
  kMark,    // partial tensors are intended: the item is marked, for later readers
  kIgnore,  // one rank saves its part alone: judged when all parts are there
};

/// Checks whether the chunks of an item tile its tensor, one item after the other. Not thread-safe; O(n log n) in the
/// chunks of the item, less for shards along one dim.
class CoverageCheck {
 public:
  /// Returns why the chunks of a tensor do not tile it, like `'w': rows 128 to 255 of 256 are in no chunk`. Empty if
  /// they do, if the item is partial on purpose and leaves only gaps, and if it is no tensor. Chunks must lie inside
  /// their tensor.
  std::string fault(const format::Item& item);
  /// Whether some elements of a tensor are in no chunk, even on purpose. Overlaps do not count.
  bool has_gap(const format::Item& item);
  /// Checks the item of a save, and treats a gap as `gaps` says. May set `item->is_partial`.
  /// \returns kInvalidArgument for an overlap, for a gap that is refused, for a chunk outside its tensor, and for a
  /// shape that the format does not have.
  base::Status check(Gaps gaps, format::Item* item);

 private:
  std::optional<planner::TilingFault> find(const format::Item& item);

  planner::BoxNumbers numbers_;
};

/// Checks whether the parts of ranks that saved on their own cover their tensors together.
///
/// Items of the same name and shape in several parts are one tensor, and each part has boxes of it. Replicas may hold
/// the same boxes. A tensor that one part holds whole costs only its name. Not thread-safe.
class PartsCoverage {
 public:
  /// Adds an item of one part.
  void add(const format::Item& item);
  /// Returns the name of each tensor with a gap that is not partial on purpose, and a sentence like that of
  /// `CoverageCheck::fault`.
  std::vector<std::pair<std::string, std::string>> faults();

 private:
  struct Union {
    planner::BoxNumbers numbers;
    bool is_covered = false;  // one part holds all of it
    bool is_partial = false;
  };

  std::map<std::pair<std::string, tensor::Dims>, Union> tensors_;
};

}  // namespace bytecheckpoint::engine
