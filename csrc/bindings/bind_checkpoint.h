// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <pybind11/pybind11.h>

#include <memory>
#include <optional>
#include <string>
#include <utility>

#include "csrc/bindings/drop.h"
#include "csrc/engine/manifest_reader.h"
#include "csrc/engine/open_checkpoint.h"
#include "csrc/format/manifest.h"

namespace bytecheckpoint::bindings {

/// A manifest as Python holds it: whole, or of a large checkpoint at first only what a load asks for. Each extension
/// module has its own Python class of it. Needs the GIL.
class Checkpoint {
 public:
  explicit Checkpoint(format::Manifest whole) : manifest_(std::make_shared<format::Manifest>(std::move(whole))) {}

  /// \param max_whole_bytes  Commit marks of ours that are larger are read in parts.
  /// \param io_timeout_s     Of silence, after which this and later calls give the storage up; 0: never.
  static Checkpoint open(const std::string& directory, const engine::OpenOptions& options, int64_t max_whole_bytes,
                         double io_timeout_s);

  /// All but items and planner data.
  const format::Manifest& head() const { return *manifest_; }
  /// Reads what has not been read. Raises what `engine::open_checkpoint` fails with, CheckpointChangedError if a newer
  /// commit has replaced the checkpoint since.
  const format::Manifest& whole() const;
  /// The same, for those who may need it longer than this object lives.
  std::shared_ptr<const format::Manifest> shared_whole() const {
    (void)whole();
    return manifest_;
  }
  /// What can be read by itself; null if all of it has been.
  engine::ManifestReader* parts() const { return parts_.has_value() ? &parts_->reader : nullptr; }

  /// The stored chunk of `fqn` that begins at `offsets`; raises KeyMismatchError if there is none.
  /// \param hint  Position to look at first, or -1.
  const format::Chunk& find_chunk(const std::string& fqn, const tensor::Dims& offsets, int64_t hint) const;

 private:
  struct Parts {
    engine::ManifestReader reader;
    std::string directory;
    engine::OpenOptions options;
    double io_timeout_s;
  };

  mutable std::shared_ptr<const format::Manifest> manifest_;
  mutable std::optional<Parts> parts_;
};

/// As Python keeps it.
using CheckpointHolder = std::unique_ptr<Checkpoint, DropUnlocked>;

void bind_checkpoint(pybind11::module_& m);

}  // namespace bytecheckpoint::bindings
