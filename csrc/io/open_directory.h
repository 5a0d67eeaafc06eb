// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "csrc/base/status.h"

namespace bytecheckpoint::io {

/// A directory that stays open: what is done to names in it happens there, wherever its path leads by then. No symbolic
/// link in it is followed, and a name is one entry of it: one with a slash, `.` and `..` are refused.
class OpenDirectory {
 public:
  OpenDirectory(OpenDirectory&& other) noexcept { *this = std::move(other); }
  OpenDirectory& operator=(OpenDirectory&& other) noexcept;
  ~OpenDirectory();

  /// \param path  The caller's; symbolic links in it are followed.
  static base::Result<OpenDirectory> open(const std::string& path);
  /// A directory in this one. \returns kStorage with ELOOP or ENOTDIR for a link.
  base::Result<OpenDirectory> open_below(const std::string& name) const;
  /// The directory that this one is in now, which need not be the one that it was opened in.
  base::Result<OpenDirectory> open_parent() const;

  /// The same directory has the same, by whatever path it was opened; a mount of it elsewhere has another `mount`.
  struct Place {
    uint64_t device = 0;
    uint64_t inode = 0;
    uint64_t mount = 0;  // 0 where the kernel does not tell
    bool operator==(const Place& o) const { return device == o.device && inode == o.inode && mount == o.mount; }
  };
  base::Result<Place> place() const;

  /// Names without `.` and `..`, in the order of the file system.
  base::Result<std::vector<std::string>> list() const;
  struct Entry {
    bool is_directory = false;
    int64_t bytes = 0;
  };
  /// What has the name itself: a link is not followed. \returns kStorage, with ENOENT if nothing has.
  base::Result<Entry> entry(const std::string& name) const;

  /// Removes the name of anything but a directory; a link is not followed. One that is already gone is fine.
  base::Status remove_file(const std::string& name) const;
  /// Removes an empty directory; one that is already gone is fine.
  base::Status remove_directory(const std::string& name) const;
  /// fsync: makes names created and removed in it survive power loss, where the file system can.
  base::Status sync() const;

  int fd() const { return fd_; }
  /// As the caller gave it, or below that; for messages.
  const std::string& path() const { return path_; }

 private:
  OpenDirectory(int fd, std::string path) : fd_(fd), path_(std::move(path)) {}
  base::Status remove(const std::string& name, int flags) const;

  int fd_ = -1;
  std::string path_;
};

}  // namespace bytecheckpoint::io
