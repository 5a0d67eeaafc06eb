// SPDX-License-Identifier: Apache-2.0
#include "csrc/engine/commit/named_files.h"

#include <algorithm>

#include "csrc/engine/open/manifest_reader.h"
#include "csrc/engine/open/open_checkpoint.h"

namespace bytecheckpoint::engine {
namespace {

base::Result<std::vector<format::FileEntry>> files_of(const std::string& directory, Scope mark) {
  base::Result<ManifestReader> reader = ManifestReader::open(directory, mark);
  if (reader.is_ok()) return reader.value().read_files();
  // The metadata of other writers can only be read whole.
  if (reader.status().code() != base::Code::kUnsupported) return reader.status();
  BCP_ASSIGN_OR_RETURN(format::Manifest manifest, open_checkpoint(directory, {mark}));
  return std::move(manifest.files);
}

}  // namespace

base::Result<std::unordered_set<std::string>> named_files(const std::string& directory,
                                                          const std::vector<std::string>& listing) {
  std::vector<Scope> marks = {Scope()};
  for (const std::string& name : listing) {
    uint32_t rank;
    if (is_rank_metadata_name(name, &rank)) marks.push_back(rank);
  }
  const bool is_listed = std::find(listing.begin(), listing.end(), kMetadataName) != listing.end();
  std::unordered_set<std::string> named;
  for (const Scope mark : marks) {
    const base::Result<std::vector<format::FileEntry>> files = files_of(directory, mark);
    if (!files.is_ok()) {
      const bool may_be_absent = !mark.has_value() && !is_listed;
      if (files.status().code() == base::Code::kNotFound && may_be_absent) continue;
      return files.status();
    }
    for (const format::FileEntry& file : files.value()) named.insert(file.name);
  }
  return named;
}

}  // namespace bytecheckpoint::engine
