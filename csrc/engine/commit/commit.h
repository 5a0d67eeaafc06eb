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
#include "csrc/engine/commit/lock_file.h"
#include "csrc/engine/names.h"
#include "csrc/format/manifest/manifest.h"
#include "csrc/io/directory.h"
#include "csrc/io/io_deadline.h"

namespace bytecheckpoint::engine {

/// What one save may do in its directory.
struct CommitOptions {
  std::string directory;
  base::Id save_id{};
  Scope scope;  // empty: all ranks commit `.metadata` together; a rank: it saves alone, and commits `__{rank}.metadata`
  bool overwrite = true;      // false: `begin` and `commit` fail with kExists if a checkpoint is there
  bool take_over = false;     // true: take the right of a live save away instead of failing with kBusy
  bool sync = true;           // false: no fsync. The commit is then atomic if processes crash, but not if power is lost
  bool direct_io = true;      // write a large metadata file with O_DIRECT, where the file system has it
  int64_t reserve_bytes = 0;  // disk space for the metadata file, reserved before any data is written
  std::string about;         // a line that stands in the tmp until the metadata do: whoever finds it knows whose it was
  double deadline_s = 3600;  // the save must be renamed within this time after `begin`
  double visibility_timeout_s = 0;  // how long to wait for files of other ranks to be seen, where they may be late
  double io_timeout_s = 0;          // a call fails if the storage has not answered for so long; 0: it waits for ever
};

/// What `commit` did after the rename.
struct CommitReport {
  bool directory_synced = false;
  int64_t files_swept = 0;
  double sweep_s = 0;                 // time that removing the files of older checkpoints took
  std::vector<std::string> warnings;  // what failed after the rename; the checkpoint is committed all the same
};

/// The coordinator's part of a save: takes the right to commit, and replaces the old checkpoint by the new one in one
/// step.
///
/// A checkpoint exists if and only if its `.metadata` does. `.metadata` changes only in step 10 below, by one rename.
/// Everything that can fail happens before it, and nothing that happens after it can undo it. A process that dies
/// before step 10 leaves the old checkpoint as it was; the next save sweeps what it leaves beside it.
///
///     begin (1 to 6) -> all ranks write and sync their files (7) -> check_files (8) -> commit (9 to 12)
///
/// The right to commit is a file, `.metadata.{save id}.tmp`. This save creates it once, locks it (`flock`), and never
/// creates it again. Whoever removes its name takes the right away, because the rename then finds nothing to rename.
/// The lock shows that the save lives, since it ends with the process. What the directory holds meanwhile:
///
///                       .metadata   .metadata.{save id}.tmp   data files
///       before begin    old                                   old
///       from step 3     old         locked, who saves         old
///       from step 7     old         locked, who saves         old, new (growing)
///       from step 9     old         locked, the new metadata  old, new (synced)
///       from step 10    new                                   old, new
///       after step 12   new                                   new
///
/// Each step names the failpoints in it (`base/failpoint.h`). The crash tests kill a process there. The model of the
/// protocol, `tests/model/commit.pml`, has labels of the same names; it lets a process die, or the power fail, between
/// any two of its steps.
///
/// The same steps stand in docs/internals/commit_protocol.md, which says why; a test compares them.
///
/// 1. Make the directories that are missing, and sync each one and its parent. Sync the entry of a directory that is
///    there already, too: a save that died may have made it. [kBeginDirectoryMade, kBeginDirectory]
/// 2. Refuse a `.metadata` that is a directory. With `overwrite=False` refuse a checkpoint that is there (kExists). A
///    save of one rank refuses `.metadata`, which would hide what it commits (kExists).
/// 3. Create the tmp with O_EXCL, write into it who saves, flush it, and lock it without waiting. Fail with kBusy if
///    another save has locked it or removed its name meanwhile, which took it for that of a dead save.
///    [kBeginTmpCreated, kBeginLocked]
/// 4. Look at the tmps of other saves. A locked one belongs to a live save: fail with kBusy, or with `take_over` remove
///    its name. Every save creates and flushes its own tmp before it looks, so of two that begin at once at least one
///    sees the other. Then repeat step 2, since a save that has just ended may have committed. Where changes are seen
///    late, note which commit mark is there. [kBeginLooked]
/// 5. Sweep what dead saves left: their tmps, and data files that no commit mark names. A sweep that fails does not
///    fail the save, unless the own tmp is gone (kBusy). Then wait until the space of all files that this process has
///    swept is free. [kSweepListed, kSweepTmpRemoved, kSweepDirectorySynced, kSweepFileRemoved, kBeginSwept]
/// 6. With `overwrite=False`, and not on a local file system, try on files of its own whether the commit without
///    replacing will work (kUnsupported). Reserve disk space for the metadata in the tmp, so that the disk cannot be
///    full when it is written. [kBeginDone]
/// 7. All ranks: create each data file with O_EXCL under a name that is drawn anew, reserve its space, write records,
///    block table and trailer, cut it to its size and sync it. Then sync the directory, and hand the result to the
///    coordinator. From then on the files belong to the coordinator or to a sweep: the rank never deletes them.
///    [kWriteFileCreated, kWriteFileReserved, kWriteData, kWriteRecordsDone, kWriteDataDone, kWriteFileCut,
///    kWriteFileSynced, kWriteFilesSynced, kWriteDirectorySynced]
/// 8. Open every file of every rank, and compare its size, its trailer and its ids with what the rank has handed in.
///    Where changes are seen late, ask again for up to `visibility_timeout_s`. [kCommitChecked]
/// 9. Check that the tmp has its name, write the metadata into it, cut it to its size and sync it. Fail with
///    kSuperseded if the deadline has passed or the tmp has lost its name. Where changes are seen late, take the last
///    look: list the directory, and fail with kSuperseded if the tmp of another save is there whose lock is not held,
///    if a file of this save is gone, or if another commit mark is there than in step 4. [kCommitMetadataFilled,
///    kCommitMetadataWritten, kCommitMetadataSynced, kCommitDecided]
/// 10. Rename the tmp to `.metadata`: this is the commit. With `overwrite=False` the rename replaces nothing, and fails
///     with kExists if `.metadata` is there. From here on nobody deletes a file of this save, unless it is certain that
///     the rename had no effect. [kCommitRenamed]
/// 11. Sync the directory, so that the rename survives power loss. If that fails, the checkpoint is committed all the
///     same (kDurabilityUnknown), and nothing is swept. [kCommitDirectorySynced]
/// 12. Remove the commit marks of single ranks, which `.metadata` hides. Sweep the files of older checkpoints. Release
///     the lock. [kRankMetadataRemoved, kSweepListed, kSweepDirectorySynced, kSweepFileRemoved, kCommitDone]
///
/// A save that fails before step 10 removes its tmp first and its data files afterwards. A crash in between then leaves
/// only files that any sweep may delete. [kAbortTmpRemoved, kAbortFileRemoved]
///
/// Thread safety: any thread may call `abort`, `abandon` and `is_over` at any time. In a forked child no call has an
/// effect, because the save is the parent's.
///
/// If storage does not answer within `io_timeout_s`, the call fails. The save can then no longer be committed, and
/// gives the right back as soon as the storage answers. The destructor waits for that: an owner that must not wait
/// deletes this with `io::DeleteInBackground`.
class Commit {
 public:
  /// Steps 1 to 6. If it fails, nothing of this save is left.
  ///
  /// A save that is not committed later removes the directories that this call has created, if they are empty.
  ///
  /// \returns kBusy if another save lives at this path. kExists if a checkpoint is there and `overwrite` is false; for
  /// a save of one rank also if `.metadata` is there, which would hide what it commits. kUnsupported if the file system
  /// cannot keep `overwrite` false. kStorage if it refuses.
  static base::Result<std::unique_ptr<Commit>> begin(CommitOptions options);
  ~Commit();

  /// Step 8. Reads the trailers only, of up to 16 files at a time.
  /// \param files  Of all ranks.
  /// \returns kCorrupt or kStorage for the first file that is not as its rank left it. kSuperseded instead if another
  /// save took the right, and swept the files.
  base::Status check_files(std::vector<format::FileEntry> files);

  /// Tells a failure that another save has caused from others: a file of this save is gone for its rank, too, where
  /// that save has swept it. \returns kSuperseded if this save cannot commit any more.
  base::Status check_right();

  /// Steps 9 to 12.
  /// \param metadata_file  All bytes of the new `.metadata`.
  /// \param files          The data files that it names: the sweep leaves them alone.
  /// \param save_id        The id in it. It is that of `begin`, but for the copy of a checkpoint.
  /// \returns kSuperseded if another save took the right, this one gave it up, or the deadline passed. kExists if
  /// `overwrite` is false and a checkpoint appeared. kStorage. kDurabilityUnknown if the checkpoint is committed, but
  /// the directory could not be synced. If the storage did not answer to the rename itself, the message says that it is
  /// not known whether the save is committed.
  base::Result<CommitReport> commit(std::string metadata_file, std::vector<format::FileEntry> files,
                                    const base::Id& save_id);

  /// Ends a failed save: removes the tmp, then this save's data files and the directories that it created, if they are
  /// empty.
  ///
  /// Deletes no data file if a rename was attempted that may have happened. Only a rename that failed for lack of room
  /// (ENOSPC, EDQUOT) and left the tmp in its place has certainly not happened.
  ///
  /// \param file_names  Data files of all ranks. Other names are ignored.
  /// \param in_doubt    The storage has already failed to answer some rank. This call then waits at most 2 s for an
  /// answer; the rest happens when the storage answers.
  /// \param links       Files that other saves may name in the same way, since they were linked or copied. They are
  /// removed only while this save has the right: behind it, another save may have given them these names again. What
  /// stays is removed by the next sweep.
  base::Status abort(std::vector<std::string> file_names, bool in_doubt = false, std::vector<std::string> links = {});

  /// Removes the tmp and leaves the data files to a sweep. No effect after `commit` or `abort`.
  void abandon();

  /// Whether this object can no longer commit: it has committed or tried to, was aborted or abandoned, or ran out of
  /// time.
  bool is_over() const { return in_forked_child() || over_ || stage_ == Stage::kGivenUp; }

  /// Identifies the directory: two paths that lead to one directory have the same id.
  const io::FileId& directory_id() const { return directory_id_; }

 private:
  /// How far the save has come. It leaves kOpen once, by an atomic exchange, so it is either renamed or given up.
  ///
  ///     kOpen -> kRenaming -> kRenamed -> kDurable
  ///           -> kGivenUp: the storage did not answer in time
  enum class Stage { kOpen, kGivenUp, kRenaming, kRenamed, kDurable };

  explicit Commit(CommitOptions options);

  /// Runs `work` under `deadline_`. If the storage does not answer in time, the save can no longer be committed, unless
  /// its rename has begun.
  template <class Work>
  auto within_deadline(std::string_view operation, Work work) -> decltype(work());
  // What the calls without `_slowly` do, without a limit of time.
  base::Status begin_slowly();
  base::Status check_files_slowly(const std::vector<format::FileEntry>& files);
  base::Status check_right_slowly();
  base::Result<CommitReport> commit_slowly(std::string_view metadata_file, const std::vector<format::FileEntry>& files);
  base::Status abort_slowly(const std::vector<std::string>& file_names, const std::vector<std::string>& links);
  base::Status abandon_slowly();
  base::Status superseded(
      std::string_view how = "this save gave up its right to commit, or a newer save took it") const;
  /// Makes the directory and those above it. \returns whether it was missing: then nothing can be in it yet.
  base::Result<bool> make_directories();
  /// \returns kUnsupported if this file system cannot commit without replacing. kStorage.
  base::Status try_to_replace_nothing() const;

  /// Step 2. \returns kExists if a checkpoint is there that this save may not replace, or that would hide what it
  /// commits.
  base::Status refuse_what_is_there() const;
  /// \returns kSuperseded if this save gave its right back, or somebody removed the tmp.
  base::Status check_own_tmp() BCP_REQUIRES(mutex_);
  bool in_forked_child() const;
  base::Status refuse_in_forked_child(std::string_view operation) const;
  /// Returns the outcome of a call on our open tmp. Some servers no longer find an open file whose name is gone: then
  /// another save has taken our right away.
  base::Status of_own_tmp(const base::Status& outcome) const;
  base::Status write_metadata(std::string_view metadata_file) BCP_REQUIRES(mutex_);
  /// What a listing says of the right, where other machines may have taken it away without a trace on this one.
  /// \param files  Of this save: it fails if one is gone.
  base::Status look_again(const std::vector<format::FileEntry>& files) const BCP_REQUIRES(mutex_);
  base::Status rename_over_metadata() BCP_REQUIRES(mutex_);
  void remove_rank_metadata(CommitReport* report) const;
  std::string path(const std::string& name) const;

  const CommitOptions options_;
  const std::chrono::steady_clock::time_point begun_;
  const pid_t owner_;
  base::Mutex mutex_;
  LockFile tmp_ BCP_GUARDED_BY(mutex_);
  std::vector<std::string> made_ BCP_GUARDED_BY(mutex_);  // directories that `begin` created
  bool rename_attempted_ BCP_GUARDED_BY(mutex_) = false;  // and nothing proves that it did not happen
  base::Id committed_id_{};                               // that of the metadata which `commit` puts in place
  io::FileId directory_id_;
  bool is_local_ = false;                                    // nothing is shown late here
  std::optional<std::string> found_ BCP_GUARDED_BY(mutex_);  // identity of the mark in step 4, where that matters
  std::atomic<bool> over_{
      false};  // written with the mutex held; read without it, also while the storage does not answer
  std::atomic<bool> directory_synced_{false};
  std::atomic<Stage> stage_{Stage::kOpen};
  std::optional<io::IoDeadline> deadline_;  // declared last, and so destroyed first: its thread uses all other members
};

}  // namespace bytecheckpoint::engine
