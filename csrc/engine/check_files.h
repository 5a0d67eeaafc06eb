// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "csrc/base/status.h"
#include "csrc/format/manifest.h"

namespace bytecheckpoint::engine {

/// Is every file in `directory` as its rank left it: size, trailer, ids? Many at a time; reads the trailers only.
///
/// \returns for the first file in the order of `files` that is not: kStorage with its errno where it cannot be read
/// (ENOENT: it is missing), kCorrupt where it is another.
base::Status check_files(const std::string& directory, const std::vector<format::FileEntry>& files);

/// Of a checkpoint of another writer, which says no sizes: how long each file must be for the records in it.
std::vector<int64_t> foreign_lengths(const format::Manifest& manifest);

/// The same for such a checkpoint, which has no trailers: is every file there, and long enough?
base::Status check_foreign_files(const std::string& directory, const format::Manifest& manifest);

}  // namespace bytecheckpoint::engine
