// SPDX-License-Identifier: Apache-2.0
#include "csrc/engine/named_files.h"

#include "csrc/engine/open_checkpoint.h"

namespace bytecheckpoint::engine {

base::Result<std::unordered_set<std::string>> named_files(const std::string& directory,
                                                          const std::vector<std::string>& listing) {
  std::vector<Scope> marks = {Scope()};
  for (const std::string& name : listing) {
    uint32_t rank;
    if (is_rank_metadata_name(name, &rank)) marks.push_back(rank);
  }
  std::unordered_set<std::string> named;
  for (const Scope mark : marks) {
    base::Result<format::Manifest> manifest = open_checkpoint(directory, {mark});
    if (!manifest.is_ok()) {
      if (manifest.status().code() == base::Code::kNotFound) continue;
      return manifest.status();
    }
    for (const format::FileEntry& file : manifest.value().files) named.insert(file.name);
  }
  return named;
}

}  // namespace bytecheckpoint::engine
