// SPDX-License-Identifier: Apache-2.0
#include "csrc/engine/check/inspect_folder.h"

#include <sys/stat.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <thread>

#include "csrc/engine/check/folder_coverage.h"
#include "csrc/engine/commit/lock_file.h"
#include "csrc/engine/open/check_files.h"
#include "csrc/format/dcp/foreign_metadata.h"
#include "csrc/io/directory.h"
#include "csrc/io/late_changes.h"

namespace bytecheckpoint::engine {
namespace {

using base::Code;
using base::Status;
using base::text;

// Most looks at a checkpoint that commits replace meanwhile, or of which a file may be seen late.
constexpr int kMaxLooks = 4;
constexpr std::chrono::milliseconds kBetweenLateLooks(500);
// For so long after a commit, another machine may not see all of it.
constexpr std::chrono::seconds kSeenLate(120);

/// Returns the state of a checkpoint whose commit mark does not open, or of which a file is not as it was written.
FolderState state_of(const Status& failure) {
  if (failure.code() == Code::kCorrupt) return FolderState::kCorrupt;
  const bool is_missing = failure.code() == Code::kStorage && failure.sys_errno() == ENOENT;
  return is_missing ? FolderState::kCorrupt : FolderState::kUnknown;
}

/// Whether a checkpoint was committed so recently, by the clock of this machine, that a part of it may be seen late.
bool is_fresh(const std::string& directory, Scope scope) {
  struct stat mark;
  if (::stat(io::join(directory, mark_name(scope)).c_str(), &mark) != 0) return true;
  return std::chrono::system_clock::now() - std::chrono::system_clock::from_time_t(mark.st_mtim.tv_sec) < kSeenLate;
}

/// Sorts the names in a directory by kind.
Status sort_names(const std::string& directory, const std::string& own_tmp, FolderInspection* found,
                  std::vector<Scope>* live) {
  BCP_ASSIGN_OR_RETURN(std::vector<std::string> names, io::list_directory(directory));
  std::sort(names.begin(), names.end());
  for (std::string& name : names) {
    Scope scope;
    uint32_t rank;
    if (name == own_tmp) continue;
    if (is_tmp_name(name, &scope)) {
      const base::Result<bool> held = LockFile::is_seen_held(io::join(directory, name));
      // A tmp that we may not look at may well be held.
      if (!held.is_ok() || held.value()) live->push_back(scope);
      found->tmps.push_back(std::move(name));
    } else if (name == kMetadataName) {
      found->marks.push_back(std::move(name));
    } else if (is_rank_metadata_name(name, &rank)) {
      found->parts.push_back(rank);
      found->marks.push_back(std::move(name));
    } else if (is_data_file_of_any_writer(name)) {
      found->data_files.push_back(std::move(name));
    } else {
      found->others.push_back(std::move(name));
    }
  }
  std::sort(found->parts.begin(), found->parts.end());
  // `.metadata` hides the parts.
  if (!found->marks.empty() && found->marks.front() == kMetadataName) found->parts.clear();
  found->is_being_saved = !live->empty();
  return Status::ok();
}

/// Returns a rank that saved on its own and left a tmp but no part; -1 if there is none.
int64_t rank_without_part(const FolderInspection& found) {
  for (const std::string& name : found.tmps) {
    Scope scope;
    if (!is_tmp_name(name, &scope) || !scope.has_value()) continue;
    if (!std::binary_search(found.parts.begin(), found.parts.end(), *scope)) return *scope;
  }
  return -1;
}

/// Returns why the marks are not those of a whole checkpoint; empty if they may be.
std::string missing_marks(const FolderInspection& found) {
  if (found.marks.empty()) {
    if (!found.tmps.empty() || !found.data_files.empty()) return "files of a save that was not committed";
    return "empty";
  }
  for (size_t i = 0; i < found.parts.size(); ++i) {
    if (found.parts[i] != i) return text("rank ", i, " has no part, but rank ", found.parts[i], " has one");
  }
  const int64_t without = found.parts.empty() ? -1 : rank_without_part(found);
  return without < 0 ? "" : text("the save of rank ", without, " was not committed");
}

Status open_and_check(const std::string& directory, Scope scope, const RanksHere& ranks, FolderInspection* found,
                      FolderCoverage* coverage) {
  BCP_ASSIGN_OR_RETURN(CommitMark mark, CommitMark::open(directory, scope));
  const format::Manifest& manifest = mark.head();
  found->num_files += static_cast<int64_t>(manifest.files.size());
  if (manifest.foreign.has_value()) {
    found->is_foreign = true;
    if (manifest.foreign->is_of_byte_checkpoint) {
      return Status::make(Code::kUnsupported, text(format::kOfByteCheckpoint, ": its parts are read one by one"));
    }
    for (const int64_t length : foreign_lengths(manifest)) found->num_bytes += length;
    BCP_RETURN_IF_ERROR(check_foreign_files(directory, manifest));
    return coverage->add(&mark);
  }
  found->save_ids.push_back(base::to_hex(manifest.save_id));
  for (const format::FileEntry& file : manifest.files) found->num_bytes += file.bytes;
  BCP_RETURN_IF_ERROR(check_files(directory, files_here(manifest.files, ranks)));
  return coverage->add(&mark);
}

base::Result<FolderInspection> look(const std::string& directory, const std::string& own_tmp, const RanksHere& ranks,
                                    bool* changed) {
  FolderInspection found;
  std::vector<Scope> live;
  BCP_RETURN_IF_ERROR(sort_names(directory, own_tmp, &found, &live));
  if (found.marks.empty() && found.tmps.empty() && found.data_files.empty() && !found.others.empty()) {
    found.reason = "it holds no files of a checkpoint";
    return found;
  }
  found.reason = missing_marks(found);
  if (!found.reason.empty()) {
    found.state = found.is_being_saved ? FolderState::kSaving : FolderState::kHalf;
    return found;
  }
  std::vector<Scope> scopes(found.parts.begin(), found.parts.end());
  FolderCoverage coverage(/*of_parts=*/!scopes.empty());
  if (scopes.empty()) scopes.push_back({});
  for (const Scope scope : scopes) {
    const Status outcome = open_and_check(directory, scope, ranks, &found, &coverage);
    if (outcome.is_ok()) continue;
    const base::Result<CommitMark> again = CommitMark::open(directory, scope);
    // A newer commit deletes the files of the older one, and a prune deletes the mark.
    if (!again.is_ok()) {
      *changed = again.status().code() == Code::kNotFound;
    } else if (!again.value().head().foreign.has_value()) {
      *changed = found.save_ids.empty() || found.save_ids.back() != base::to_hex(again.value().head().save_id);
    }
    found.state = state_of(outcome);
    found.reason = outcome.message();
    if (!*changed && io::may_be_late(outcome) && io::look_anew(directory)) {
      *changed = true;
      std::this_thread::sleep_for(kBetweenLateLooks);
      if (is_fresh(directory, scope)) {
        found.state = FolderState::kUnknown;
        found.reason += "; it was committed less than two minutes ago, and this file system may show files late";
      }
    }
    return found;
  }
  found.reason = coverage.fault();
  found.state = found.reason.empty() ? FolderState::kComplete : FolderState::kIncomplete;
  return found;
}

}  // namespace

base::Result<FolderInspection> inspect_folder(const std::string& directory, const std::string& own_tmp,
                                              const RanksHere& ranks) {
  for (int looks = 1;; ++looks) {
    bool changed = false;
    base::Result<FolderInspection> found = look(directory, own_tmp, ranks, &changed);
    if (!found.is_ok() || !changed || looks == kMaxLooks) return found;
  }
}

}  // namespace bytecheckpoint::engine
