// SPDX-License-Identifier: Apache-2.0
#include "csrc/engine/commit/commit.h"

#include <unistd.h>

#include <cerrno>
#include <unordered_set>
#include <utility>

#include "csrc/base/failpoint.h"
#include "csrc/engine/commit/live_saves.h"
#include "csrc/engine/commit/sweep.h"
#include "csrc/engine/open/check_files.h"
#include "csrc/engine/open/open_checkpoint.h"
#include "csrc/engine/random_id.h"
#include "csrc/io/directory.h"
#include "csrc/io/file_system.h"
#include "csrc/io/late_changes.h"
#include "csrc/io/late_freeing.h"

namespace bytecheckpoint::engine {
namespace {

using base::Code;
using base::Status;
using base::text;

/// How long `abort` waits for storage that has already failed to answer.
constexpr double kTimeoutInDoubtS = 2;

/// A smaller metadata file is faster through the page cache: the sync waits for the disk only once.
constexpr int64_t kLargeMetadataBytes = 1 << 20;

}  // namespace

Commit::Commit(CommitOptions options)
    : options_(std::move(options)), begun_(std::chrono::steady_clock::now()), owner_(::getpid()) {
  deadline_.emplace(options_.io_timeout_s);
}

Commit::~Commit() {
  deadline_.reset();  // waits for calls that the storage has not answered
  if (!in_forked_child()) (void)abandon_slowly();
}

template <class Work>
auto Commit::within_deadline(std::string_view operation, Work work) -> decltype(work()) {
  // If `work` returns after the deadline, its thread gives the right back: nobody else can before.
  auto outcome = deadline_->run(operation, options_.directory, std::move(work), [this] { (void)abandon_slowly(); });
  if (deadline_->is_exhausted()) {
    Stage open = Stage::kOpen;
    stage_.compare_exchange_strong(open, Stage::kGivenUp);
  }
  return outcome;
}

bool Commit::in_forked_child() const {
  return ::getpid() != owner_;
}

Status Commit::refuse_in_forked_child(std::string_view operation) const {
  if (!in_forked_child()) return Status::ok();
  return Status::make(Code::kCancelled,
                      std::string(operation) + ": this process is a forked child; the save belongs to its parent",
                      options_.directory);
}

std::string Commit::path(const std::string& name) const {
  return io::join(options_.directory, name);
}

base::Result<std::unique_ptr<Commit>> Commit::begin(CommitOptions options) {
  std::unique_ptr<Commit> commit(new Commit(std::move(options)));
  Commit* const begun = commit.get();
  Status outcome = commit->within_deadline("begin", [begun] {
    Status outcome = begun->begin_slowly();
    if (!outcome.is_ok()) (void)begun->abandon_slowly();
    return outcome;
  });
  if (outcome.is_ok()) return commit;
  if (commit->deadline_->is_exhausted()) io::DeleteInBackground()(commit.release());
  return outcome;
}

Status Commit::begin_slowly() {
  const CommitOptions& o = options_;
  BCP_ASSIGN_OR_RETURN(const bool is_new, make_directories());
  BCP_FAILPOINT(kBeginDirectory);
  if (!is_new) BCP_RETURN_IF_ERROR(refuse_what_is_there());
  const std::string own_tmp = tmp_name(o.save_id, o.scope);
  const base::MutexLock lock(mutex_);
  bool is_again = false;
  BCP_RETURN_IF_ERROR(io::ask_until_seen(o.directory, o.visibility_timeout_s, [&]() BCP_REQUIRES(mutex_) -> Status {
    base::Result<LockFile> tmp = LockFile::create(path(own_tmp), o.about, std::exchange(is_again, true));
    if (!tmp.is_ok() && tmp.status().sys_errno() == ENOENT) {
      // A prune, or the failed save that had created the directory, removed it as unused. They do so only while it is
      // empty. If another machine did, it may seem to be there for a while.
      BCP_RETURN_IF_ERROR(io::make_directories(o.directory, o.sync, &made_));
      tmp = LockFile::create(path(own_tmp), o.about, is_again);
    }
    BCP_ASSIGN_OR_RETURN(tmp_, std::move(tmp));
    return Status::ok();
  }));
  BCP_FAILPOINT(kBeginLocked);
  BCP_ASSIGN_OR_RETURN(directory_id_, io::file_id(o.directory));
  // From here on `abandon_slowly` removes our tmp if anything fails. A save that was given up meanwhile must not take
  // the right of another one away.
  if (stage_ == Stage::kGivenUp) return superseded();
  BCP_RETURN_IF_ERROR(refuse_live_saves(o.directory, own_tmp, o.scope, o.take_over));
  // Looks again: a save that ended before we held our tmp may have committed since.
  BCP_RETURN_IF_ERROR(refuse_what_is_there());
  is_local_ = io::is_local(o.directory);
  // A mark that cannot be read is replaced; then nobody can tell whether it was replaced meanwhile.
  if (!is_local_) {
    base::Result<std::string> found = identity_of_mark(o.directory, o.scope);
    if (found.is_ok()) found_ = std::move(found.value());
  }
  BCP_FAILPOINT(kBeginLooked);
  // What cannot be swept stays. A sweep that fails is no reason to refuse the save, unless it has lost its right.
  const base::Result<SweepReport> swept = sweep(o.directory, own_tmp, {}, o.scope);
  if (!swept.is_ok() && swept.status().code() == Code::kBusy) return swept.status();
  BCP_FAILPOINT(kBeginSwept);
  // Also a quota may leave no room for a third checkpoint, and it may be another rank that meets it.
  io::wait_until_freed();
  if (!o.overwrite && !is_local_) BCP_RETURN_IF_ERROR(try_to_replace_nothing());
  BCP_RETURN_IF_ERROR(of_own_tmp(tmp_.file().reserve(o.reserve_bytes)));
  BCP_FAILPOINT(kBeginDone);
  return Status::ok();
}

base::Result<bool> Commit::make_directories() {
  const base::MutexLock lock(mutex_);
  BCP_RETURN_IF_ERROR(io::make_directories(options_.directory, options_.sync, &made_));
  return !made_.empty() && made_.back() == options_.directory;
}

Status Commit::try_to_replace_nothing() const {
  // Names of data files: what a crash leaves of them is swept.
  std::string names[2];
  for (std::string& name : names) {
    format::DataFileId id;
    id.rank = options_.scope.value_or(0);
    BCP_ASSIGN_OR_RETURN(id.file_id, draw_id());
    name = path(format::data_file_name(id));
  }
  Status tried = io::try_rename_new(names[0], names[1]);
  if (tried.sys_errno() != EOPNOTSUPP) return tried;
  return Status::make(Code::kUnsupported,
                      text("begin(", options_.directory, "): overwrite=False cannot be kept here: ", tried.message(),
                           "; save each step into a folder of its own, with overwrite=True"),
                      options_.directory, EOPNOTSUPP);
}

Status Commit::refuse_what_is_there() const {
  const CommitOptions& o = options_;
  const std::string mark = path(mark_name(o.scope));
  BCP_ASSIGN_OR_RETURN(const io::EntryType own, io::entry_type(mark));
  if (own == io::EntryType::kDirectory) {
    return Status::storage("begin", mark, "is a directory, but the metadata of a checkpoint is a file", EISDIR);
  }
  if (own != io::EntryType::kAbsent && !o.overwrite) {
    return Status::make(Code::kExists,
                        text("begin(", o.directory, "): Checkpoint already exists and overwrite is False"), o.directory,
                        EEXIST);
  }
  if (o.scope.has_value()) {
    BCP_ASSIGN_OR_RETURN(const io::EntryType global, io::entry_type(path(std::string(kMetadataName))));
    if (global == io::EntryType::kAbsent) return Status::ok();
    return Status::make(Code::kExists,
                        text("begin(", o.directory, "): rank ", *o.scope, " saves without collectives, and ",
                             kMetadataName, " of a save with collectives is there: it would hide the new checkpoint"),
                        o.directory, EEXIST);
  }
  if (o.overwrite) return Status::ok();
  // Parts that ranks saved on their own are a checkpoint, too, and this save would remove them.
  BCP_ASSIGN_OR_RETURN(const std::vector<std::string> names, io::list_directory(o.directory));
  for (const std::string& name : names) {
    if (!is_rank_metadata_name(name)) continue;
    return Status::make(Code::kExists,
                        text("begin(", o.directory, "): Checkpoint already exists and overwrite is False: ", name,
                             " of a save without collectives"),
                        o.directory, EEXIST);
  }
  return Status::ok();
}

Status Commit::check_own_tmp() {
  const bool given_back = over_ || stage_ == Stage::kGivenUp;
  return !given_back && tmp_.has_name() ? Status::ok() : superseded();
}

Status Commit::of_own_tmp(const Status& outcome) const {
  const bool is_gone = outcome.sys_errno() == ENOENT || outcome.sys_errno() == ESTALE;
  return is_gone ? superseded() : outcome;
}

Status Commit::superseded(std::string_view how) const {
  return Status::make(Code::kSuperseded, text("commit(", options_.directory, "): ", how), options_.directory);
}

Status Commit::check_files(std::vector<format::FileEntry> files) {
  BCP_RETURN_IF_ERROR(refuse_in_forked_child("check"));
  return within_deadline("check", [this, files = std::move(files)] { return check_files_slowly(files); });
}

Status Commit::check_files_slowly(const std::vector<format::FileEntry>& files) {
  const auto check = [&]() -> Status {
    Status outcome = engine::check_files(options_.directory, files);
    if (!outcome.is_ok()) BCP_RETURN_IF_ERROR(check_right_slowly());
    deadline_->answered();
    return outcome;
  };
  BCP_RETURN_IF_ERROR(io::ask_until_seen(options_.directory, options_.visibility_timeout_s, check));
  BCP_FAILPOINT(kCommitChecked);
  return Status::ok();
}

Status Commit::check_right() {
  BCP_RETURN_IF_ERROR(refuse_in_forked_child("check"));
  return within_deadline("check", [this] { return check_right_slowly(); });
}

Status Commit::check_right_slowly() {
  const base::MutexLock lock(mutex_);
  BCP_RETURN_IF_ERROR(check_own_tmp());
  return is_local_ ? Status::ok() : look_again({});
}

base::Result<CommitReport> Commit::commit(std::string metadata_file, std::vector<format::FileEntry> files,
                                          const base::Id& save_id) {
  BCP_RETURN_IF_ERROR(refuse_in_forked_child("commit"));
  committed_id_ = save_id;
  base::Result<CommitReport> outcome =
      within_deadline("commit", [this, metadata_file = std::move(metadata_file), files = std::move(files)] {
        return commit_slowly(metadata_file, files);
      });
  if (outcome.is_ok() || !deadline_->is_exhausted()) return outcome;
  const Status silent = outcome.status();
  CommitReport report;
  switch (stage_.load()) {
    case Stage::kOpen:
    case Stage::kGivenUp:
      return silent;
    case Stage::kRenaming:
      return Status::make(silent.code(), text(silent.message(), "; it is not known whether the save is committed"),
                          silent.path(), silent.sys_errno());
    case Stage::kRenamed:
      return Status::make(Code::kDurabilityUnknown, text("committed, durability unknown: ", silent.message()),
                          silent.path(), silent.sys_errno());
    case Stage::kDurable:
      report.directory_synced = directory_synced_;
      report.warnings.push_back(text("removing files of older saves failed: ", silent.message()));
  }
  return report;
}

base::Result<CommitReport> Commit::commit_slowly(std::string_view metadata_file,
                                                 const std::vector<format::FileEntry>& files) {
  base::MutexLock lock(mutex_);
  BCP_RETURN_IF_ERROR(check_own_tmp());
  BCP_RETURN_IF_ERROR(of_own_tmp(write_metadata(metadata_file)));
  if (!is_local_) BCP_RETURN_IF_ERROR(look_again(files));
  // Checks again while no rename was attempted, so that a failure may still delete our files.
  BCP_RETURN_IF_ERROR(check_own_tmp());
  Stage open = Stage::kOpen;
  if (!stage_.compare_exchange_strong(open, Stage::kRenaming)) return superseded();
  over_ = true;
  BCP_FAILPOINT(kCommitDecided);
  BCP_RETURN_IF_ERROR(rename_over_metadata());
  stage_ = Stage::kRenamed;
  BCP_FAILPOINT(kCommitRenamed);

  CommitReport report;
  Status durable;
  if (options_.sync) durable = io::sync_directory(options_.directory, &report.directory_synced);
  if (durable.is_ok()) {
    directory_synced_ = report.directory_synced;
    stage_ = Stage::kDurable;
    deadline_->answered();
  }
  BCP_FAILPOINT(kCommitDirectorySynced);
  if (!durable.is_ok()) {
    tmp_.release();
    return Status::make(Code::kDurabilityUnknown, text("committed, durability unknown: ", durable.message()),
                        options_.directory, durable.sys_errno());
  }
  if (options_.sync && !report.directory_synced) {
    report.warnings.push_back("this file system cannot sync a directory: after power loss the rename may be missing");
  }
  const auto begin_of_sweep = std::chrono::steady_clock::now();
  if (!options_.scope.has_value()) remove_rank_metadata(&report);
  std::vector<std::string> own_files;
  for (const format::FileEntry& file : files) own_files.push_back(file.name);
  base::Result<SweepReport> swept = sweep(options_.directory, /*own_tmp=*/"", own_files, options_.scope);
  if (!swept.is_ok()) {
    report.warnings.push_back(text("removing files of older saves failed: ", swept.status().message()));
  } else {
    report.files_swept = swept.value().files_removed;
    if (!swept.value().declined.empty())
      report.warnings.push_back(text("files of older saves were not removed: ", swept.value().declined));
  }
  report.sweep_s = std::chrono::duration<double>(std::chrono::steady_clock::now() - begin_of_sweep).count();
  tmp_.release();
  BCP_FAILPOINT(kCommitDone);
  return report;
}

Status Commit::write_metadata(std::string_view metadata_file) {
  const auto bytes = static_cast<int64_t>(metadata_file.size());
  BCP_RETURN_IF_ERROR(options_.direct_io && bytes >= kLargeMetadataBytes
                          ? tmp_.file().write_past_cache(metadata_file, 0)
                          : tmp_.file().write_at(metadata_file.data(), bytes, 0));
  BCP_FAILPOINT(kCommitMetadataFilled);
  BCP_RETURN_IF_ERROR(tmp_.file().truncate(bytes));
  BCP_FAILPOINT(kCommitMetadataWritten);
  // After either call, closing the tmp cannot report a failed write any more. It is closed after the commit.
  BCP_RETURN_IF_ERROR(options_.sync ? tmp_.file().sync() : tmp_.file().flush());
  BCP_FAILPOINT(kCommitMetadataSynced);
  const std::chrono::duration<double> age = std::chrono::steady_clock::now() - begun_;
  if (age.count() > options_.deadline_s) {
    return Status::make(
        Code::kSuperseded,
        text("commit(", options_.directory, "): ", age.count(),
             " s have passed since the save began, but the commit deadline is ", options_.deadline_s, " s"),
        options_.directory);
  }
  return Status::ok();
}

Status Commit::look_again(const std::vector<format::FileEntry>& files) const {
  BCP_ASSIGN_OR_RETURN(const std::vector<std::string> listing, io::list_directory(options_.directory));
  const std::unordered_set<std::string_view> names(listing.begin(), listing.end());
  const std::string own_tmp = tmp_name(options_.save_id, options_.scope);
  if (names.count(own_tmp) == 0) return superseded();
  for (const std::string& name : listing) {
    Scope of_tmp;
    if (!is_tmp_name(name, &of_tmp) || name == own_tmp || !concerns(options_.scope, of_tmp)) continue;
    // Held: that save sees ours as well, and is about to give up.
    BCP_ASSIGN_OR_RETURN(const LockFile::Probe probe, LockFile::probe(path(name), false));
    if (probe != LockFile::Probe::kFree) continue;
    return superseded(text("another save or a removal has begun here since: ", name,
                           " is there, and locks do not tell whether its process lives"));
  }
  // A listing may lack what another machine has just created, but not what was there before, unless it is gone.
  std::vector<format::FileEntry> unlisted;
  for (const format::FileEntry& file : files) {
    if (names.count(file.name) == 0) unlisted.push_back(file);
  }
  const Status there = engine::check_files(options_.directory, unlisted);
  if (!there.is_ok()) return superseded(text("a newer save has removed files of this one: ", there.message()));
  if (!found_.has_value()) return Status::ok();
  BCP_ASSIGN_OR_RETURN(const std::string mark, identity_of_mark(options_.directory, options_.scope));
  if (mark.empty() || mark == *found_) return Status::ok();
  return superseded("another save has committed here since this one began");
}

Status Commit::rename_over_metadata() {
  const std::string from = tmp_.file().path();
  const std::string to = path(mark_name(options_.scope));
  rename_attempted_ = true;
  Status renamed = options_.overwrite ? io::rename_over(from, to) : io::rename_new(from, to);
  if (renamed.is_ok()) return renamed;
  const int error = renamed.sys_errno();
  // ENOSPC and EDQUOT: if the tmp still has its name, nothing was renamed, and the files may be deleted. They must be:
  // a user who is over a quota may not even be able to begin the save that would sweep them.
  if (error == ENOSPC || error == EDQUOT) {
    const base::Result<io::EntryType> left = io::entry_type(from);
    rename_attempted_ = !left.is_ok() || left.value() != io::EntryType::kRegular;
  }
  (void)tmp_.remove();
  if (error == EEXIST) {
    return Status::make(
        Code::kExists,
        text("rename(", to, "): Checkpoint already exists and overwrite is False: it appeared during the save"),
        options_.directory, EEXIST);
  }
  if (error == ENOENT) {
    // A network file system may repeat the rename by itself, and find the name gone because the first attempt
    // succeeded.
    const auto current = open_checkpoint(options_.directory, {options_.scope});
    if (current.is_ok() && current.value().save_id == committed_id_) return Status::ok();
    return Status::make(Code::kSuperseded, text("rename(", from, "): a newer save took this one's right to commit"),
                        options_.directory, ENOENT);
  }
  return renamed;
}

void Commit::remove_rank_metadata(CommitReport* report) const {
  // `.metadata` hides the commit marks of single ranks. If they stayed, no sweep could delete the files that they name.
  const auto names = io::list_directory(options_.directory);
  if (!names.is_ok()) return report->warnings.push_back(names.status().message());
  for (const std::string& name : names.value()) {
    if (!is_rank_metadata_name(name)) continue;
    const Status removed = io::remove_file(path(name));
    if (!removed.is_ok()) report->warnings.push_back(removed.message());
    BCP_FAILPOINT(kRankMetadataRemoved);
  }
}

Status Commit::abort(std::vector<std::string> file_names, bool in_doubt, std::vector<std::string> links) {
  if (in_forked_child()) return Status::ok();
  if (in_doubt) deadline_->shorten(kTimeoutInDoubtS);
  return within_deadline(
      "abort", [this, names = std::move(file_names), links = std::move(links)] { return abort_slowly(names, links); });
}

Status Commit::abort_slowly(const std::vector<std::string>& file_names, const std::vector<std::string>& links) {
  base::MutexLock lock(mutex_);
  over_ = true;
  if (rename_attempted_) {
    tmp_.release();
    return Status::ok();
  }
  Status outcome;
  const auto note = [&](Status each) {
    if (outcome.is_ok()) outcome = std::move(each);
  };
  const auto remove = [&](const std::string& name) {
    if (format::is_data_file_name(name)) note(io::remove_file(path(name)));
    deadline_->answered();
  };
  for (auto name = links.begin(); name != links.end() && tmp_.has_name(); ++name) remove(*name);
  // The right goes before all else: a crash in between leaves files that any sweep may delete.
  note(tmp_.remove());
  BCP_FAILPOINT(kAbortTmpRemoved);
  for (const std::string& name : file_names) {
    remove(name);
    BCP_FAILPOINT(kAbortFileRemoved);
  }
  io::remove_empty_directories(made_);
  return outcome;
}

void Commit::abandon() {
  if (in_forked_child() || over_) return;
  (void)within_deadline("abandon", [this] { return abandon_slowly(); });
}

Status Commit::abandon_slowly() {
  base::MutexLock lock(mutex_);
  if (over_) return Status::ok();
  over_ = true;
  Status outcome = tmp_.remove();
  io::remove_empty_directories(made_);
  return outcome;
}

}  // namespace bytecheckpoint::engine
