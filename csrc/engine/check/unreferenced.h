// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <string>
#include <vector>

#include "csrc/base/status.h"

namespace bytecheckpoint::engine {

/// The result of `find_unreferenced`.
struct Unreferenced {
  std::vector<std::string> files;  // data files that no commit mark names, sorted; empty while a save may be under way
  std::vector<std::string> notes;  // for people: tmps of saves, and files that may be theirs
};

/// Looks for `.distcp` files in `directory` that no commit mark names: left by a save that died, by stock DCP whose
/// checkpoint was replaced, or by a copy that failed. Ignores all other files. Opens nothing for writing and takes no
/// lock.
///
/// A save that is under way has files that no mark names yet, and a save that has just committed is removing those of
/// the older one. So if a tmp is in the directory, or the lock of a commit mark is held, no file is called
/// unreferenced. Whether a lock is held can be seen without taking it. That it is free can only be proven by taking it,
/// which would make a beginning save fail with kBusy.
///
/// \returns kStorage if the directory cannot be listed. A commit mark that cannot be read is a note.
base::Result<Unreferenced> find_unreferenced(const std::string& directory);

}  // namespace bytecheckpoint::engine
