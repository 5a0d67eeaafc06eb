// SPDX-License-Identifier: Apache-2.0
#include "csrc/engine/commit/live_saves.h"

#include <vector>

#include "csrc/engine/commit/lock_file.h"
#include "csrc/io/directory.h"

namespace bytecheckpoint::engine {

using base::Status;

Status refuse_live_saves(const std::string& directory, const std::string& own_tmp, Scope scope, bool take_over) {
  BCP_ASSIGN_OR_RETURN(const std::vector<std::string> names, io::list_directory(directory));
  for (const std::string& name : names) {
    Scope of_tmp;
    if (!is_tmp_name(name, &of_tmp) || !concerns(scope, of_tmp) || name == own_tmp) continue;
    BCP_ASSIGN_OR_RETURN(const LockFile::Probe probe, LockFile::probe(io::join(directory, name), false));
    if (probe != LockFile::Probe::kHeld) continue;
    if (!take_over) {
      return Status::make(base::Code::kBusy,
                          base::text("begin(", directory, "): another save is under way and holds ", name,
                                     "; wait for it, or set Config(take_over=True) to take its right to commit away"),
                          directory);
    }
    BCP_RETURN_IF_ERROR(io::remove_file(io::join(directory, name)));
  }
  return Status::ok();
}

}  // namespace bytecheckpoint::engine
