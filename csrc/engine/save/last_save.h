// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <optional>
#include <string>
#include <unordered_map>
#include <vector>

#include "csrc/base/content_hash.h"
#include "csrc/format/manifest/manifest.h"
#include "csrc/tensor/strided_view.h"

namespace bytecheckpoint::engine {

/// A data file of a save, and in how many saves before it was linked instead of being written.
struct SavedFile {
  format::FileEntry entry;
  int num_links = 0;
  size_t num_tensors = 0;  // records of tensors in it that the save has
};

/// A tensor record of a save, and the hash of its elements.
struct SavedRecord {
  tensor::Box box;
  format::Record record;  // `file` is an index into LastSave::files
  base::ContentHash hash;
  std::optional<base::ContentHash> sample;  // see `staging::hash_sample`; unknown of a save of another process
};

/// What one rank wrote in a save: what the next one of the same run compares, to write only what has changed.
struct LastSave {
  std::string directory;
  std::vector<SavedFile> files;
  std::unordered_map<std::string, std::vector<SavedRecord>> records;  // by FQN

  /// \returns null if no such box of that tensor was written.
  const SavedRecord* find(const std::string& fqn, const tensor::Box& box, tensor::DType dtype) const;
  /// Returns the hashes of the records of each file, in the order in which they lie there, as 16 bytes each; without
  /// files of which a record has none.
  std::vector<std::pair<const SavedFile*, std::string>> hashes_by_file() const;
};

/// The hashes that a save has stored of one of its files; see FORMAT.md.
struct StoredHashes {
  int num_links = 0;
  std::string hashes;
};

/// Returns what a rank wrote in a committed save. Files whose hashes do not fit are left out: they will be written.
LastSave last_save_of(const format::Manifest& manifest, const std::string& directory, uint32_t rank,
                      const std::unordered_map<std::string, StoredHashes>& hashes_by_name);

}  // namespace bytecheckpoint::engine
