// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <optional>
#include <string>
#include <utility>

#include "csrc/base/status.h"
#include "csrc/engine/coverage.h"
#include "csrc/engine/manifest_reader.h"
#include "csrc/engine/names.h"
#include "csrc/format/manifest.h"

namespace bytecheckpoint::engine {

/// A commit mark that is looked at: read whole, or, of a large one of ours, its head, and the boxes of its items when
/// they are asked for. A prune looks at many checkpoints after each save.
class Mark {
 public:
  /// \returns what open_checkpoint fails with.
  static base::Result<Mark> open(const std::string& directory, Scope scope);

  /// Without items if the mark is large.
  const format::Manifest& head() const { return manifest_; }
  /// Calls `visit(item)` for each item; records may be missing.
  template <class Visit>
  base::Status for_each_item(const Visit& visit) {
    for (const format::Item& item : manifest_.items) visit(item);
    for (uint64_t i = 0; parts_.has_value() && i < parts_->view().num_items(); ++i) {
      BCP_ASSIGN_OR_RETURN(const format::Item item, parts_->read_boxes(i));
      visit(item);
    }
    return base::Status::ok();
  }

 private:
  Mark(format::Manifest manifest, std::optional<ManifestReader> parts)
      : manifest_(std::move(manifest)), parts_(std::move(parts)) {}

  format::Manifest manifest_;
  std::optional<ManifestReader> parts_;
};

/// Whether the tensors of one folder have all their elements: those of its commit mark, or those of the parts that
/// ranks saved on their own, together.
class FolderCoverage {
 public:
  explicit FolderCoverage(bool of_parts) : of_parts_(of_parts) {}

  /// The next commit mark. One of a save of ours that this process has judged before is not read again.
  /// \returns what reading fails with.
  base::Status add(Mark* mark);
  /// The first tensor that does not: `'w': rows 128 to 255 of 256 are in no chunk, and 3 more tensors`. Empty if all
  /// do.
  std::string fault();

 private:
  const bool of_parts_;
  std::string fault_;
  PartsCoverage parts_;
};

}  // namespace bytecheckpoint::engine
