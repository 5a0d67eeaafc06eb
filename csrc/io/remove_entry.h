// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "csrc/base/status.h"
#include "csrc/io/open_directory.h"

namespace bytecheckpoint::io {

/// What a removal may do.
struct RemovalRules {
  /// Whether a file of this name protects its directory: a directory with such a file at any depth stays whole.
  std::function<bool(const std::string& name)> stays;
  /// Called before each entry is looked at or removed. An error ends the removal.
  std::function<base::Status()> may_go_on;
  /// Only look, and report what would be removed.
  bool dry_run = false;
};

/// What a removal has done; for a dry run, what it would do.
struct RemovalOutcome {
  int64_t bytes = 0;                   // of the files that were removed, without those that have other names
  std::vector<base::Status> failures;  // the first few errors; all else was removed all the same
  std::string kept;                    // why a directory was left as it is; empty if it was not left
};

/// Removes one entry of a directory: a file, a link, or a directory with everything below it. It first looks at all
/// that is below, and removes nothing if some of it must stay. If another file system is mounted below, the whole
/// directory stays.
///
/// Each step is a call on an open directory and follows no link. So nothing outside `in` is removed, even if somebody
/// replaces a directory by a link meanwhile: that is an error in `failures`, and so is a directory that was moved, or
/// one in which a removed file is that somebody may have open.
/// Trees may have any depth, because only two or three directories are open at a time.
///
/// \returns the error of `may_go_on`.
base::Result<RemovalOutcome> remove_entry(const OpenDirectory& in, const std::string& name, const RemovalRules& rules);

}  // namespace bytecheckpoint::io
