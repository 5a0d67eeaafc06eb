// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <string>
#include <vector>

#include "csrc/base/status.h"
#include "csrc/engine/names.h"

namespace bytecheckpoint::engine {

/// What a sweep removed.
struct SweepReport {
  int64_t tmps_removed = 0;
  int64_t files_removed = 0;
  std::string declined;  // why no data file was deleted, although some were candidates; else empty
};

/// Removes what dead saves left in `directory`: their tmps, and data files that no commit mark names.
///
/// The order is essential. For each step, the model of the protocol (`tests/model/commit.pml`, two savers with crashes,
/// power loss, and a file system that shows late what other machines do) finds a lost checkpoint if the step is left
/// out or moved:
///
/// 1. List the data files. The own tmp of a save that begins must be there: else another save has taken its right away,
///    and may be over before this one looks again. [kSweepListed]
/// 2. A save that begins removes tmps whose lock is free: those saves can no longer commit. Its own tmp tells them. A
///    save that has committed has none any more, and takes no right away. [kSweepTmpRemoved]
/// 3. List the tmps again. If another save has one, delete nothing: it may have begun since. Nor if the own tmp is gone
///    by now.
/// 4. Only then read the commit marks. If one cannot be read, delete nothing.
/// 5. Sync the directory: a rename that is not on disk yet must not outlive the files that it replaced.
///    [kSweepDirectorySynced]
/// 6. Delete the files of step 1 that no commit mark names. [kSweepFileRemoved]
///
/// Deletes only regular files of our naming, in the directory itself, and those that NFS or FUSE have hidden there and
/// that nobody can have open any more (`io/hidden_files.h`). Their space may be free a little later
/// (`io/late_freeing.h`).
///
/// \param own_tmp  Name of the tmp of a save that begins; left alone. Empty for one that has committed.
/// \param own_files  Names of the caller's data files; left alone.
/// \param scope  The caller's. A rank that saves on its own looks at its own and at global saves, and deletes only
/// files of its own naming.
/// \returns kBusy if another save has removed the tmp of one that begins. kStorage if the file system refuses; some
/// files may then be deleted already.
base::Result<SweepReport> sweep(const std::string& directory, const std::string& own_tmp,
                                const std::vector<std::string>& own_files, Scope scope = {});

}  // namespace bytecheckpoint::engine
