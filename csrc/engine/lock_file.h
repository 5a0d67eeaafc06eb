// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <sys/types.h>

#include <memory>
#include <string>

#include "csrc/base/status.h"
#include "csrc/io/file.h"
#include "csrc/io/open_directory.h"

namespace bytecheckpoint::engine {

/// The tmp of a save that is under way: a file that exists as long as the save may commit, and is locked as long as it
/// lives. A lock goes with its process, so a dead save's tmp is known by its free lock.
///
/// A forked child closes its copy of the descriptor: it must not keep the lock of a parent that died. What the child
/// then does with its copy of this object has no effect: the file is the parent's.
class LockFile {
 public:
  enum class Probe { kGone, kFree, kHeld };

  LockFile() = default;
  LockFile(LockFile&& other) noexcept { *this = std::move(other); }
  LockFile& operator=(LockFile&& other) noexcept;
  ~LockFile() { release(); }

  /// Creates and locks `path`. Where the file system has no locks it is created only.
  /// \returns kBusy if somebody removed or locked it in between: another save is looking at this path.
  static base::Result<LockFile> create(const std::string& path);
  /// The same in a directory that is open, where it is also removed, wherever its path leads by then.
  static base::Result<LockFile> create(std::shared_ptr<const io::OpenDirectory> in, const std::string& name);

  /// Looks at the tmp of another save (kGone if it is no regular file) and, if it is free, removes it when
  /// `remove_if_free`: that save can no longer commit. The lock is held while the name is removed.
  static base::Result<Probe> probe(const std::string& path, bool remove_if_free);

  /// Is the lock of the tmp of a save seen to be held? Looks only: it takes no lock, not even a shared one for a
  /// moment, which would make a save that is just beginning kBusy (`create`), or one that looks at this tmp (`probe`).
  ///
  /// It asks the kernel's list of flocks, and on network file systems the server. So false does not prove that a save
  /// is dead: not seen is one in another container of this host, or on another host where flock stays on each host.
  /// Who means to remove anything must `probe`, with a tmp of its own. False for what is gone or no regular file.
  static base::Result<bool> is_seen_held(const std::string& path);

  io::File& file() { return file_; }
  /// Has nobody removed its name?
  bool has_name();
  /// Removes the name, then lets go of the lock.
  base::Status remove();
  /// Lets go of the lock.
  void release();

 private:
  static base::Result<LockFile> lock(LockFile lock);
  void track();
  /// False in a forked child, which thereby lets go of its copy.
  bool is_ours();

  io::File file_;
  std::string name_;                                    // in directory_
  std::shared_ptr<const io::OpenDirectory> directory_;  // null: file_ has a path
  int tracked_ = -1;
  pid_t owner_ = 0;
};

}  // namespace bytecheckpoint::engine
