// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <sys/types.h>

#include <atomic>
#include <chrono>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "csrc/base/bytes.h"
#include "csrc/base/mutex.h"
#include "csrc/base/status.h"
#include "csrc/engine/lock_file.h"
#include "csrc/engine/names.h"
#include "csrc/format/manifest.h"
#include "csrc/io/directory.h"
#include "csrc/io/patience.h"

namespace bytecheckpoint::engine {

struct CommitOptions {
  std::string directory;
  base::Id save_id{};
  Scope scope;                // a rank that saves on its own commits `__{rank}.metadata`
  bool overwrite = true;      // false: an existing checkpoint is kExists
  bool take_over = false;     // true: removes even the tmp of a live save, which then cannot commit
  bool sync = true;           // false: atomic against a crash of processes, not against power loss
  int64_t reserve_bytes = 0;  // space for the metadata, asked for before any data is written
  double deadline_s = 3600;   // from begin; no rename after it
  double io_timeout_s = 0;    // of silence, after which the storage is given up; 0: never
};

struct CommitReport {
  bool directory_synced = false;
  int64_t files_swept = 0;
  double sweep_s = 0;                 // seconds of removing what the commit has made superfluous
  std::vector<std::string> warnings;  // of what went wrong after the commit, and did not undo it
};

/// The coordinator's right to commit one save, from `begin` to the rename that makes the checkpoint exist.
///
/// The right is a locked file, `.metadata.{save id}.tmp`, created once and never again. Whoever removes its name takes
/// the right away: the rename then finds nothing to rename. Everything that can fail happens before the rename; nothing
/// that follows can undo it. A checkpoint exists if and only if its `.metadata` does.
///
///     begin -> (all ranks write and sync their files) -> check_files -> commit
///
/// `abort`, `abandon` and the destructor give the right back; all are safe from any thread, at any time. In a forked
/// child nothing has any effect: the save is the parent's.
///
/// Storage that does not answer makes every call fail in time, and the save with it: from then on it cannot be
/// committed any more, and gives the right back as soon as the storage answers. The destructor waits for that: see
/// `io::DeletePatiently`.
class Commit {
 public:
  /// Creates missing directories, takes the right, sweeps what dead saves left, reserves space.
  /// A save that is not committed removes the directories that it has created, where they are empty.
  /// \returns kBusy if another save lives at this path, kExists (for one rank also if `.metadata` is there, which would
  /// hide what it commits), kStorage; then nothing of ours is left.
  static base::Result<std::unique_ptr<Commit>> begin(CommitOptions options);
  ~Commit();

  /// Is every file there as its rank left it: size, trailer, ids? In parallel; the trailers only.
  /// \returns kSuperseded if files are gone because the right is: another save swept them.
  base::Status check_files(std::vector<format::FileEntry> files);

  /// Writes and syncs `metadata_file` into the tmp and renames it over `.metadata`: the commit. Then makes that
  /// durable and sweeps.
  /// \returns kSuperseded if the right is gone or the deadline passed; kExists; kStorage; kDurabilityUnknown if the
  /// checkpoint is committed and the directory could not be synced. Of storage that does not answer to the rename
  /// itself the message says that it is not known whether the save is committed.
  base::Result<CommitReport> commit(std::string metadata_file, std::vector<format::FileEntry> files);

  /// Ends a failed save: gives the right back, then deletes its files, unless a rename was attempted that may have
  /// happened: all but one that was refused for lack of room.
  /// \param in_doubt  The storage has not answered somebody: this call does not wait long, but the rest happens when it
  /// answers.
  base::Status abort(std::vector<std::string> file_names, bool in_doubt = false);

  /// Gives the right back and leaves the files to a sweep. No effect after commit or abort.
  void abandon();

  bool is_over() const;

  /// Which directory it is, whatever its path.
  const io::FileId& directory_id() const { return directory_id_; }

 private:
  /// What may still become of the save. It leaves kOpen once: to be committed, or never to be.
  enum class Stage { kOpen, kGivenUp, kRenaming, kRenamed, kDurable };

  explicit Commit(CommitOptions options);

  /// `work` with patience; without any left the save cannot be committed any more, unless it is being renamed.
  template <class Work>
  auto patiently(std::string_view operation, Work work) -> decltype(work());
  // What the calls of the same names do, for as long as it takes.
  base::Status begin_slowly();
  base::Status check_files_slowly(const std::vector<format::FileEntry>& files);
  base::Result<CommitReport> commit_slowly(std::string_view metadata_file, const std::vector<format::FileEntry>& files);
  base::Status abort_slowly(const std::vector<std::string>& file_names);
  base::Status abandon_slowly();
  base::Status superseded() const;
  base::Status make_directories();

  /// kExists if a checkpoint is there that this one may not replace, or that would hide it.
  base::Status refuse_what_is_there() const;
  /// kSuperseded if the right was given back or taken away.
  base::Status check_right() BCP_REQUIRES(mutex_);
  bool in_forked_child() const;
  base::Status write_metadata(std::string_view metadata_file) BCP_REQUIRES(mutex_);
  base::Status rename_over_metadata() BCP_REQUIRES(mutex_);
  void remove_rank_metadata(CommitReport* report) const;
  std::string path(const std::string& name) const;

  const CommitOptions options_;
  const std::chrono::steady_clock::time_point begun_;
  const pid_t owner_;
  base::Mutex mutex_;
  LockFile tmp_ BCP_GUARDED_BY(mutex_);
  std::vector<std::string> made_ BCP_GUARDED_BY(mutex_);  // directories of this save
  bool rename_attempted_ BCP_GUARDED_BY(mutex_) = false;  // and it may have happened
  io::FileId directory_id_;
  std::atomic<bool> over_{false};  // changed with the mutex held; asked also while storage does not answer
  std::atomic<bool> directory_synced_{false};
  std::atomic<Stage> stage_{Stage::kOpen};
  std::optional<io::Patience> patience_;  // last: its thread uses the rest
};

}  // namespace bytecheckpoint::engine
