// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <map>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "csrc/base/status.h"
#include "csrc/format/manifest.h"
#include "csrc/planner/coverage.h"

namespace bytecheckpoint::engine {

/// What a save makes of a tensor whose chunks leave a gap.
enum class Gaps : uint8_t {
  kRefuse,  // it fails
  kMark,    // partial tensors are meant: the item says so to later readers
  kIgnore,  // it is the part of one rank of several; the gap is judged when all parts are there
};

/// Looks at the chunks of one item after the other. Not thread-safe.
class CoverageCheck {
 public:
  /// Why the chunks of a tensor do not tile it: `'w': rows 128 to 255 of 256 are in no chunk`. Empty if they do, for a
  /// gap of an item that is partial on purpose, and for what is no tensor. Chunks must lie in their tensor.
  std::string fault(const format::Item& item);
  /// Are there elements of a tensor that no chunk has, also on purpose? Overlaps do not count.
  bool has_gap(const format::Item& item);
  /// The same as `fault` for a save, where a gap is what `gaps` says. \returns kInvalidArgument, also for a chunk that
  /// lies outside its tensor and for a shape that the format does not have.
  base::Status check(Gaps gaps, format::Item* item);

 private:
  std::optional<planner::TilingFault> find(const format::Item& item);

  planner::BoxNumbers numbers_;
};

/// Whether the parts of ranks that saved on their own cover their tensors together.
///
/// What has one name and one shape in several parts is one tensor, of which they have boxes: replicas may share them.
/// Plain tensors that a part has whole are kept as a name.
class PartsCoverage {
 public:
  void add(const format::Item& item);
  /// Of each tensor with a gap that is not partial on purpose: its name, and the sentence as above.
  std::vector<std::pair<std::string, std::string>> faults();

 private:
  struct Union {
    planner::BoxNumbers numbers;
    bool is_covered = false;  // by a part alone
    bool is_partial = false;
  };

  std::map<std::pair<std::string, tensor::Dims>, Union> tensors_;
};

}  // namespace bytecheckpoint::engine
