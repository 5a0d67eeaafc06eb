// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "csrc/base/status.h"
#include "csrc/io/open_directory.h"

namespace bytecheckpoint::io {

struct RemovalRules {
  /// A directory with a file of such a name, anywhere below it, stays whole.
  std::function<bool(const std::string& name)> stays;
  /// Asked before every entry that is looked at or removed; what fails there ends it.
  std::function<base::Status()> may_go_on;
  /// Only looks.
  bool dry_run = false;
};

/// What became of an entry that was to go, or of a dry run: what would.
struct Removed {
  int64_t bytes = 0;                   // of the files whose names are gone
  std::vector<base::Status> failures;  // the first few; the rest was removed all the same
  std::string kept;                    // why a directory was left as it is; empty if it was not
};

/// Removes one entry of a directory: a file, a link, or a directory with everything below it, which is looked at before
/// anything goes. What is mounted below it stays, and with it the directory.
///
/// Each step is a call on an open directory that follows no link, so nothing is removed that is not below `in` when its
/// directory is opened, whoever puts a link in the place of a directory meanwhile: that is a failure, as is a directory
/// that was moved. Trees may be of any depth: two or three directories are open at a time.
///
/// \returns what `may_go_on` failed with.
base::Result<Removed> remove_entry(const OpenDirectory& in, const std::string& name, const RemovalRules& rules);

}  // namespace bytecheckpoint::io
