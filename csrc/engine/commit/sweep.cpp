// SPDX-License-Identifier: Apache-2.0
#include "csrc/engine/commit/sweep.h"

#include <algorithm>
#include <unordered_set>

#include "csrc/base/failpoint.h"
#include "csrc/engine/commit/lock_file.h"
#include "csrc/engine/commit/named_files.h"
#include "csrc/io/directory.h"
#include "csrc/io/hidden_files.h"
#include "csrc/io/late_freeing.h"

namespace bytecheckpoint::engine {

using base::Status;

namespace {

/// Whether `name` is the tmp of another save that conflicts with one of `scope`.
bool is_tmp_of_other(const std::string& name, const std::string& own_tmp, Scope scope) {
  Scope of_tmp;
  return is_tmp_name(name, &of_tmp) && name != own_tmp && concerns(scope, of_tmp);
}

bool has(const std::vector<std::string>& names, const std::string& name) {
  return std::find(names.begin(), names.end(), name) != names.end();
}

/// Removes the tmps of dead saves. \returns how many.
base::Result<int64_t> take_rights(const std::string& directory, const std::vector<std::string>& listing,
                                  const std::string& own_tmp, Scope scope) {
  int64_t removed = 0;
  for (const std::string& name : listing) {
    if (!is_tmp_of_other(name, own_tmp, scope)) continue;
    BCP_ASSIGN_OR_RETURN(const LockFile::Probe probe, LockFile::probe(io::join(directory, name), true));
    if (probe == LockFile::Probe::kFree) ++removed;
    BCP_FAILPOINT(kSweepTmpRemoved);
  }
  return removed;
}

/// Returns which other save may be under way; empty if none.
base::Result<std::string> other_save(const std::string& directory, const std::vector<std::string>& listing,
                                     const std::string& own_tmp, Scope scope) {
  for (const std::string& name : listing) {
    if (!is_tmp_of_other(name, own_tmp, scope)) continue;
    BCP_ASSIGN_OR_RETURN(const io::EntryType type, io::entry_type(io::join(directory, name)));
    if (type == io::EntryType::kRegular) return name;
  }
  return std::string();
}

}  // namespace

base::Result<SweepReport> sweep(const std::string& directory, const std::string& own_tmp,
                                const std::vector<std::string>& own_files, Scope scope) {
  SweepReport report;
  std::vector<std::string> candidates;
  BCP_ASSIGN_OR_RETURN(const std::vector<std::string> listing, io::list_directory(directory));
  const bool is_beginning = !own_tmp.empty();
  if (is_beginning && !has(listing, own_tmp)) {
    return Status::make(base::Code::kBusy,
                        base::text("begin(", directory, "): another save is beginning here, and has removed ", own_tmp),
                        directory);
  }
  for (const std::string& name : listing) {
    if (is_data_file_of(scope, name) || io::is_left_hidden(directory, name)) candidates.push_back(name);
  }
  BCP_FAILPOINT(kSweepListed);

  if (is_beginning) {
    BCP_ASSIGN_OR_RETURN(report.tmps_removed, take_rights(directory, listing, own_tmp, scope));
  }
  if (candidates.empty()) return report;

  // Lists again: a save may have begun since.
  BCP_ASSIGN_OR_RETURN(const std::vector<std::string> after, io::list_directory(directory));
  if (is_beginning && !has(after, own_tmp)) {
    report.declined = "another save has removed " + own_tmp;
    return report;
  }
  BCP_ASSIGN_OR_RETURN(const std::string other, other_save(directory, after, own_tmp, scope));
  if (!other.empty()) {
    report.declined = "another save holds " + other;
    return report;
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
