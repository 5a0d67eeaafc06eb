// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "csrc/base/status.h"
#include "csrc/engine/names.h"
#include "csrc/format/manifest/manifest_view.h"

namespace bytecheckpoint::engine {

/// Reads parts of the manifest of a checkpoint, for a rank that needs a few of millions of chunks: `open_checkpoint`
/// would read all of it.
///
/// Every call reads only the blocks of the manifest that it needs. Errors name the file. Not thread-safe.
class ManifestReader {
 public:
  /// Reads the trailer, the block table and the first block.
  /// \param io_timeout_s  This and later calls fail if the storage has not answered a read for so long; 0: never.
  /// Opening the file has no limit.
  /// \returns kNotFound without a commit mark. kUnsupported for a mark without our trailer: `open_checkpoint` can say
  /// more about it. kCorrupt. kVersion. kStorage.
  static base::Result<ManifestReader> open(const std::string& directory, Scope scope = {}, double io_timeout_s = 0);

  /// Reads everything but items and planner data.
  base::Result<format::Manifest> read_head();
  /// Reads the list of files.
  base::Result<std::vector<format::FileEntry>> read_files();
  /// Reads an item with the chunks that overlap any of `boxes`, each chunk once, in the order of the manifest. An item
  /// of bytes comes with its one chunk.
  base::Result<format::Item> read_part(const format::FoundItem& found, const std::vector<tensor::Box>& boxes);

  // See the functions of the same names of `format::ManifestView`.
  base::Status check_blocks();
  base::Result<format::Item> read_boxes(uint64_t number);
  base::Result<std::optional<format::FoundItem>> find_item(std::string_view fqn);
  base::Result<std::vector<std::string>> read_names();
  base::Result<std::vector<format::Chunk>> read_overlapping(const format::FoundItem& found, const tensor::Box& box);
  base::Result<format::FileEntry> read_file(uint32_t number);

  const format::ManifestView& view() const { return view_; }

 private:
  static base::Result<ManifestReader> open_once(const std::string& directory, Scope scope, double io_timeout_s);
  ManifestReader(std::string path, format::ManifestView view) : path_(std::move(path)), view_(std::move(view)) {}

  std::string path_;
  format::ManifestView view_;
};

}  // namespace bytecheckpoint::engine
