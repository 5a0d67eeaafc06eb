// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <string>
#include <vector>

#include "csrc/base/status.h"
#include "csrc/engine/names.h"

namespace bytecheckpoint::engine {

struct SweepReport {
  int64_t tmps_removed = 0;
  int64_t files_removed = 0;
  std::string declined;  // why nothing was deleted although there were files to look at; empty if nothing was declined
};

/// Removes what dead saves left in `directory`: their tmps, and data files that no commit mark names.
///
/// The order is the point, each step closing a hole that a model of two and three savers with crashes and power loss
/// finds without it: list data files; remove tmps whose lock is free (those saves can no longer commit); only then read
/// the commit marks; sync the directory (a rename that is not on disk yet must not outlive the files it replaced);
/// delete what was listed and is not named. Deletes nothing if any commit mark cannot be read, or while another save
/// lives.
///
/// \param own_tmp    Name of the caller's tmp; left alone.
/// \param own_files  Names of the caller's data files; left alone.
/// \param scope      Of the caller: a rank that saves on its own looks at its own and at global saves, and deletes only
/// files of its own naming.
base::Result<SweepReport> sweep(const std::string& directory, const std::string& own_tmp,
                                const std::vector<std::string>& own_files, Scope scope = {});

}  // namespace bytecheckpoint::engine
