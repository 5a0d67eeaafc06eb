// SPDX-License-Identifier: Apache-2.0
#include "csrc/io/hidden_files.h"

#include <ctime>

#include "csrc/io/directory.h"

namespace bytecheckpoint::io {

namespace {

/// Longer than a reader holds a file of a checkpoint that was removed, and than clocks differ.
constexpr time_t kHeldForS = 3600;

}  // namespace

bool is_hidden_name(std::string_view name) {
  const auto begins_with = [name](std::string_view prefix) { return name.substr(0, prefix.size()) == prefix; };
  return begins_with(".nfs") || begins_with(".fuse_hidden");
}

bool may_be_held(const struct stat& hidden) {
  return ::time(nullptr) < hidden.st_ctim.tv_sec + kHeldForS;
}

bool is_left_hidden(const std::string& directory, const std::string& name) {
  struct stat info;
  return is_hidden_name(name) && ::lstat(join(directory, name).c_str(), &info) == 0 && S_ISREG(info.st_mode) &&
         !may_be_held(info);
}

}  // namespace bytecheckpoint::io
