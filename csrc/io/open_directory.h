// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "csrc/base/status.h"

namespace bytecheckpoint::io {

/// An open directory. All functions work in this very directory, wherever its path leads to later. They follow no
/// symbolic link, and take the name of one entry: a name with a slash, `.` and `..` are refused (EINVAL). Its functions
/// may be called from any thread.
class OpenDirectory {
 public:
  OpenDirectory(OpenDirectory&& other) noexcept { *this = std::move(other); }
  OpenDirectory& operator=(OpenDirectory&& other) noexcept;
  ~OpenDirectory();

  /// Opens a directory. \param path  The caller's; symbolic links in it are followed.
  static base::Result<OpenDirectory> open(const std::string& path);
  /// Opens a directory in this one. \returns kStorage, with ELOOP or ENOTDIR for a link.
  base::Result<OpenDirectory> open_below(const std::string& name) const;
  /// Opens the directory that this one is in now. If it was moved, that is another one than before.
  base::Result<OpenDirectory> open_parent() const;

  /// Identifies a directory: it is the same by every path, except that a mount of it elsewhere has another `mount`.
  struct Place {
    uint64_t device = 0;
    uint64_t inode = 0;
    uint64_t mount = 0;  // 0 if the kernel does not tell
    bool operator==(const Place& o) const { return device == o.device && inode == o.inode && mount == o.mount; }
  };
  base::Result<Place> place() const;

  /// Returns the names without `.` and `..`, in the order of the file system.
  base::Result<std::vector<std::string>> list() const;
  struct Entry {
    bool is_directory = false;
    int64_t bytes = 0;         // that removing the name frees: 0 of a file that has others
    bool may_be_held = false;  // it is removed already, and somebody may have it open (`hidden_files.h`)
  };
  /// Returns what has the name itself: a link is not followed. \returns kStorage, with ENOENT if nothing has it.
  base::Result<Entry> entry(const std::string& name) const;

  /// Removes the name of anything but a directory; a link is not followed. No error if it is already gone.
  base::Status remove_file(const std::string& name) const;
  /// Removes an empty directory. No error if it is already gone. FUSE and NFS keep a file that was removed while it was
  /// open under a name of their own: while there is nothing else in the directory, it waits for the last close, which
  /// FUSE hands on late, for 2 s at most.
  base::Status remove_directory(const std::string& name) const;
  /// Syncs the directory: names created and removed in it then survive power loss, if the file system can do that.
  base::Status sync() const;

  int fd() const { return fd_; }
  /// The caller's path, or a path below it. For messages only.
  const std::string& path() const { return path_; }

 private:
  OpenDirectory(int fd, std::string path) : fd_(fd), path_(std::move(path)) {}
  base::Status remove(const std::string& name, int flags) const;
  /// Whether a directory holds nothing but files that are removed already.
  bool has_only_removed_files(const std::string& name) const;

  int fd_ = -1;
  std::string path_;
};

}  // namespace bytecheckpoint::io
