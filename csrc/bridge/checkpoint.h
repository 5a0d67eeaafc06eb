// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <pybind11/pybind11.h>

#include <memory>
#include <optional>
#include <string>
#include <utility>

#include "csrc/bridge/drop.h"
#include "csrc/engine/load/checkpoint_view.h"
#include "csrc/engine/load/stored_checksums.h"
#include "csrc/engine/open/manifest_reader.h"
#include "csrc/engine/open/open_checkpoint.h"
#include "csrc/format/manifest/manifest.h"

namespace bytecheckpoint::bridge {

/// A manifest, as Python holds it. It is whole, or, for a large checkpoint of ours, only the parts that a load asks for
/// are read at first. Each extension module (`_C` and `_core`) has its own Python class of it. Not thread-safe: needs
/// the GIL.
class Checkpoint {
 public:
  explicit Checkpoint(format::Manifest whole) : manifest_(std::make_shared<format::Manifest>(std::move(whole))) {}
  explicit Checkpoint(std::shared_ptr<const engine::CheckpointView> view)
      : manifest_(view, &view->manifest), view_(std::move(view)) {}

  /// \param max_whole_bytes  Larger commit marks of ours are read in parts.
  /// \param io_timeout_s     This and later calls fail if the storage has not answered for so long; 0: never.
  static Checkpoint open(const std::string& directory, const engine::OpenOptions& options, int64_t max_whole_bytes,
                         double io_timeout_s);

  /// Everything but items and planner data is filled in.
  const format::Manifest& head() const { return *manifest_; }
  /// Returns the whole manifest; reads it if that has not happened yet. Raises the errors of `engine::open_checkpoint`,
  /// and CheckpointChangedError if a newer commit has replaced the checkpoint since.
  const format::Manifest& whole() const;
  /// The same, for users that may need it longer than this object lives.
  std::shared_ptr<const format::Manifest> shared_whole() const {
    (void)whole();
    return manifest_;
  }
  /// Reads parts of the manifest; null if all of it has been read.
  engine::ManifestReader* parts() const { return parts_.has_value() ? &parts_->reader : nullptr; }

  /// Whether this is a view of `stored`.
  bool is_view_of(const Checkpoint& stored) const {
    return view_ != nullptr && stored.parts() == nullptr && view_->stored == stored.manifest_;
  }
  /// Null for what is stored.
  const engine::CheckpointView* view() const { return view_.get(); }
  /// Returns a chunk of an item of `whole()`, and how it lies in its record.
  engine::ChunkInRecord chunk_of(const format::Item& item, size_t chunk) const {
    return {&item.chunks[chunk], view_ == nullptr ? nullptr : view_->find(item, chunk)};
  }
  /// The checksums that another writer stored, as far as conversions have come.
  engine::StoredChecksums* checksums() const { return checksums_.get(); }
  /// Returns the chunk of `fqn` that begins at `offsets`. Raises KeyMismatchError if there is none.
  /// \param hint  Position to look at first, or -1.
  engine::ChunkInRecord find_chunk(const std::string& fqn, const tensor::Dims& offsets, int64_t hint) const;

 private:
  struct Parts {
    engine::ManifestReader reader;
    std::string directory;
    engine::OpenOptions options;
    double io_timeout_s;
  };

  mutable std::shared_ptr<const format::Manifest> manifest_;
  std::shared_ptr<const engine::CheckpointView> view_;  // null for what is stored
  mutable std::optional<Parts> parts_;
  std::unique_ptr<engine::StoredChecksums> checksums_ = std::make_unique<engine::StoredChecksums>();
};

/// How Python holds it: freed without the GIL, since a large manifest takes milliseconds.
using CheckpointHolder = std::unique_ptr<Checkpoint, DeleteWithoutGil>;

}  // namespace bytecheckpoint::bridge
