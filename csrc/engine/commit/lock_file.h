// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <sys/types.h>

#include <memory>
#include <string>

#include "csrc/base/status.h"
#include "csrc/io/disk_file.h"
#include "csrc/io/open_directory.h"

namespace bytecheckpoint::engine {

/// The tmp of a save, created and locked (`flock`). It has its name as long as the save may commit, and is locked as
/// long as the save lives. The lock ends with the process, so a free lock means that the save is dead.
///
///     name there, locked    the save lives and may commit
///     name there, free      the save has died: whoever sweeps removes the name
///     name gone             the save has committed (the file is `.metadata` now), or can no longer commit
///
/// A forked child closes its copy of the descriptor, because it must not keep the lock of a parent that has died. Its
/// copy of this object has no effect, because the file is the parent's. Not thread-safe.
class LockFile {
 public:
  enum class Probe { kGone, kFree, kHeld };  // no regular file there; a dead save's; a live save's

  LockFile() = default;
  LockFile(LockFile&& other) noexcept { *this = std::move(other); }
  LockFile& operator=(LockFile&& other) noexcept;
  ~LockFile() { release(); }

  /// Creates and locks `path`; only creates it if the file system has no locks.
  /// \param about  A line to write into it, or nothing.
  /// \param is_again  Whether this process has tried before. A file of this name is ours then: a file system can create
  ///                  it and answer that it is missing, since another save has removed it meanwhile (sshfs).
  /// \returns kBusy if somebody locked or removed it in between: another save is looking at this path. kStorage.
  static base::Result<LockFile> create(const std::string& path, const std::string& about = "", bool is_again = false);
  /// The same in an open directory. `remove` then also works in that directory, whatever its path leads to by then.
  static base::Result<LockFile> create(std::shared_ptr<const io::OpenDirectory> in, const std::string& name);

  /// Tries to lock the tmp of another save. If it is free and `remove_if_free` is true, removes it: that save can no
  /// longer commit. The lock is held while the name is removed, and then given back.
  /// \returns kGone for anything but a regular file. kStorage if the file cannot be opened, locked or removed.
  static base::Result<Probe> probe(const std::string& path, bool remove_if_free);

  /// Whether the lock of a tmp is seen to be held; false if nothing is there, or no regular file.
  ///
  /// It asks the kernel's list of flocks, and on network file systems the server. Within a container that list lacks
  /// the saves of other containers, so there it tries a shared lock for a moment. `create` and `probe` ask again for
  /// some milliseconds if they meet such a lock; a save of an older version may fail with kBusy.
  ///
  /// False does not prove that a save is dead: it may run on another host where flock is local to each host. Whoever
  /// wants to remove anything must create a tmp of its own and call `probe`.
  static base::Result<bool> is_seen_held(const std::string& path);

  io::DiskFile& file() { return file_; }
  /// Whether nobody has removed its name.
  bool has_name();
  /// Removes the name, then the lock.
  base::Status remove();
  /// Unlocks and closes the file; the name stays.
  void release();

 private:
  static base::Result<LockFile> lock(LockFile lock, const std::string& about);
  void track();
  /// Whether this process has created the file. In a forked child it also drops the child's copy, and returns false.
  bool is_ours();

  io::DiskFile file_;
  std::string name_;                                    // the name in directory_
  std::shared_ptr<const io::OpenDirectory> directory_;  // null: file_ has a path
  int tracked_ = -1;
  pid_t owner_ = 0;
};

}  // namespace bytecheckpoint::engine
