// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "csrc/base/status.h"
#include "csrc/engine/names.h"
#include "csrc/format/manifest_view.h"

namespace bytecheckpoint::engine {

/// The manifest of a checkpoint on disk, of which only what is asked for is read: `open_checkpoint` for a rank that
/// wants a few of millions of chunks. Failures name the file. Not thread-safe.
class ManifestReader {
 public:
  /// Reads trailer, block table and the first block.
  /// \returns kNotFound without a commit mark; kUnsupported for one without our trailer, of which `open_checkpoint`
  /// can tell more; kCorrupt, kVersion, kStorage.
  /// \param io_timeout_s  Of silence, after which each call gives the storage up; 0: never. This one takes what it
  /// takes.
  static base::Result<ManifestReader> open(const std::string& directory, Scope scope = {}, double io_timeout_s = 0);

  /// Everything but items and planner data.
  base::Result<format::Manifest> read_head();
  /// An item with those of its chunks that share elements with any of `boxes`, each once, in the order of the manifest;
  /// of bytes, with its chunk.
  base::Result<format::Item> read_part(const format::FoundItem& found, const std::vector<tensor::Box>& boxes);

  // As of ManifestView.
  base::Result<format::Item> read_boxes(uint64_t number);
  base::Result<std::optional<format::FoundItem>> find_item(std::string_view fqn);
  base::Result<std::vector<std::string>> read_names();
  base::Result<std::vector<format::Chunk>> read_overlapping(const format::FoundItem& found, const tensor::Box& box);
  base::Result<format::FileEntry> read_file(uint32_t number);

  const format::ManifestView& view() const { return view_; }

 private:
  ManifestReader(std::string path, format::ManifestView view) : path_(std::move(path)), view_(std::move(view)) {}

  std::string path_;
  format::ManifestView view_;
};

}  // namespace bytecheckpoint::engine
