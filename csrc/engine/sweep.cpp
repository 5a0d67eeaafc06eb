// SPDX-License-Identifier: Apache-2.0
#include "csrc/engine/sweep.h"

#include <algorithm>
#include <unordered_set>

#include "csrc/base/failpoint.h"
#include "csrc/engine/lock_file.h"
#include "csrc/engine/named_files.h"
#include "csrc/io/directory.h"
#include "csrc/io/late_freeing.h"

namespace bytecheckpoint::engine {

using base::Status;

base::Result<SweepReport> sweep(const std::string& directory, const std::string& own_tmp,
                                const std::vector<std::string>& own_files, Scope scope) {
  const auto is_right_gone = [&](const std::vector<std::string>& names) {
    return !own_tmp.empty() && std::find(names.begin(), names.end(), own_tmp) == names.end();
  };
  SweepReport report;
  std::vector<std::string> candidates;
  BCP_ASSIGN_OR_RETURN(const std::vector<std::string> listing, io::list_directory(directory));
  if (is_right_gone(listing)) {
    return Status::make(base::Code::kBusy,
                        base::text("begin(", directory, "): another save is beginning here, and has removed ", own_tmp),
                        directory);
  }
  for (const std::string& name : listing) {
    if (is_data_file_of(scope, name)) candidates.push_back(name);
  }
  BCP_FAILPOINT(kSweepListed);

  for (const std::string& name : listing) {
    Scope of_tmp;
    if (own_tmp.empty() || !is_tmp_name(name, &of_tmp) || name == own_tmp || !concerns(scope, of_tmp)) continue;
    BCP_ASSIGN_OR_RETURN(const LockFile::Probe probe, LockFile::probe(io::join(directory, name), true));
    if (probe == LockFile::Probe::kFree) ++report.tmps_removed;
    BCP_FAILPOINT(kSweepTmpRemoved);
  }
  if (candidates.empty()) return report;

  // Lists again: a save may have begun since.
  BCP_ASSIGN_OR_RETURN(const std::vector<std::string> after, io::list_directory(directory));
  if (is_right_gone(after)) {
    report.declined = "another save has removed " + own_tmp;
    return report;
  }
  for (const std::string& name : after) {
    Scope of_tmp;
    if (!is_tmp_name(name, &of_tmp) || name == own_tmp || !concerns(scope, of_tmp)) continue;
    BCP_ASSIGN_OR_RETURN(const io::EntryType type, io::entry_type(io::join(directory, name)));
    if (type == io::EntryType::kRegular) {
      report.declined = base::text("another save holds ", name);
      return report;
    }
  }
  base::Result<std::unordered_set<std::string>> named = named_files(directory, after);
  if (!named.is_ok()) {
    report.declined = named.status().message();
    return report;
  }
  std::unordered_set<std::string> keep = std::move(named.value());
  keep.insert(own_files.begin(), own_files.end());

  bool synced = false;
  for (const std::string& name : candidates) {
    const std::string path = io::join(directory, name);
    if (keep.count(name) != 0) continue;
    BCP_ASSIGN_OR_RETURN(const io::EntryType type, io::entry_type(path));
    if (type != io::EntryType::kRegular) continue;
    if (!synced) {
      BCP_RETURN_IF_ERROR(io::sync_directory(directory));
      BCP_FAILPOINT(kSweepDirectorySynced);
      synced = true;
    }
    BCP_RETURN_IF_ERROR(io::remove_and_free_later(path));
    ++report.files_removed;
    BCP_FAILPOINT(kSweepFileRemoved);
  }
  return report;
}

}  // namespace bytecheckpoint::engine
