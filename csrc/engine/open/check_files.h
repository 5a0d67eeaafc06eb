// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <optional>
#include <set>
#include <string>
#include <vector>

#include "csrc/base/status.h"
#include "csrc/format/manifest/manifest.h"

namespace bytecheckpoint::engine {

/// Checks that every file in `directory` is as its rank left it: size, trailer, ids. Reads the trailers only, of up to
/// 16 files at a time.
///
/// \returns for the first file in the order of `files` that is not: kStorage with an errno if it cannot be read (ENOENT
/// if it is missing), kCorrupt if it is another file.
base::Status check_files(const std::string& directory, const std::vector<format::FileEntry>& files);

/// Returns how long each file of another writer's checkpoint must be to hold the records in it: its metadata says no
/// sizes.
std::vector<int64_t> foreign_lengths(const format::Manifest& manifest);

/// Checks that every file of such a checkpoint is there and long enough. It has no trailers to compare. \returns as
/// above.
base::Status check_foreign_files(const std::string& directory, const format::Manifest& manifest);

/// Ranks whose data files are in a directory; nothing for all ranks.
using RanksHere = std::optional<std::set<uint32_t>>;
/// Returns those of `files` that are in it.
std::vector<format::FileEntry> files_here(const std::vector<format::FileEntry>& files, const RanksHere& ranks);

}  // namespace bytecheckpoint::engine
