// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <string>
#include <vector>

#include "csrc/base/status.h"

namespace bytecheckpoint::engine {

/// Data files that no commit mark names.
struct Unreferenced {
  std::vector<std::string> files;  // sorted; none while a save may be under way
  std::vector<std::string> notes;  // tmps of saves, and files that may be theirs
};

/// Looks for `.distcp` files in `directory` that no commit mark names: a save that died, stock DCP that was saved over,
/// a copy that went wrong. What else lies there is not ours to judge.
///
/// A save that is under way has files that nothing names yet, and one that has just committed removes those of the save
/// before. So with a tmp in the directory, or a commit mark whose lock is held, nothing is called unreferenced: a lock
/// that is held can be seen, one that is free cannot without taking it, and that would make a beginning save Busy.
/// Opens nothing for writing, takes no lock.
///
/// \returns kStorage if the directory cannot be listed. A commit mark that cannot be read is a note.
base::Result<Unreferenced> find_unreferenced(const std::string& directory);

}  // namespace bytecheckpoint::engine
