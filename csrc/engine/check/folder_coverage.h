// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <optional>
#include <string>
#include <utility>

#include "csrc/base/status.h"
#include "csrc/engine/coverage.h"
#include "csrc/engine/names.h"
#include "csrc/engine/open/manifest_reader.h"
#include "csrc/format/manifest/manifest.h"

namespace bytecheckpoint::engine {

/// A commit mark to look at. It opens if, and only if, the first look of a load accepts it: the pickle of ours is
/// checked, too. It is read whole. Only of a large one of ours (more than 32 MiB, of which loads do not read the pickle
/// either), the blocks of the manifest are checked, and the boxes of an item are read when it is visited.
class CommitMark {
 public:
  /// \returns the errors of `open_checkpoint`.
  static base::Result<CommitMark> open(const std::string& directory, Scope scope);

  /// The manifest; without items if the mark is large.
  const format::Manifest& head() const { return manifest_; }
  /// Calls `visit(item)` for each item; the chunks may have no records. \returns the error of reading the items of a
  /// large mark.
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
  CommitMark(format::Manifest manifest, std::optional<ManifestReader> parts)
      : manifest_(std::move(manifest)), parts_(std::move(parts)) {}

  format::Manifest manifest_;
  std::optional<ManifestReader> parts_;
};

/// Finds out whether the tensors of one checkpoint have all their elements: those of its commit mark, or those of all
/// parts together if ranks saved on their own. Not thread-safe.
class FolderCoverage {
 public:
  /// \param of_parts  The marks are those of ranks that saved on their own, and are judged together.
  explicit FolderCoverage(bool of_parts) : of_parts_(of_parts) {}

  /// Adds the next commit mark. The result for a save of ours is remembered in the process by its save id, so that its
  /// items are not read again.
  /// \returns the error of reading.
  base::Status add(CommitMark* mark);
  /// Returns the first tensor with a fault: `'w': rows 128 to 255 of 256 are in no chunk, and 3 more tensors`. Empty if
  /// there is none.
  std::string fault();

 private:
  const bool of_parts_;
  std::string fault_;
  PartsCoverage parts_;
};

}  // namespace bytecheckpoint::engine
