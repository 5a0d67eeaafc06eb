// SPDX-License-Identifier: Apache-2.0
#include "csrc/io/open_directory.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <thread>
#include <utility>

#include "csrc/io/directory.h"
#include "csrc/io/hidden_files.h"
#include "csrc/io/journal.h"
#include "csrc/io/open_beneath.h"

namespace bytecheckpoint::io {
namespace {

using base::Status;

/// How long to wait for the last close of files that were removed.
constexpr std::chrono::seconds kLongestClose(2);
constexpr std::chrono::milliseconds kBetweenTries(5);

constexpr int kFlags = O_RDONLY | O_DIRECTORY | O_CLOEXEC;

bool is_entry(const std::string& name) {
  return !name.empty() && name != "." && name != ".." && name.find_first_of(std::string("/\0", 2)) == name.npos;
}

}  // namespace

OpenDirectory& OpenDirectory::operator=(OpenDirectory&& other) noexcept {
  if (this != &other) {
    if (fd_ >= 0) ::close(fd_);
    fd_ = std::exchange(other.fd_, -1);
    path_ = std::move(other.path_);
  }
  return *this;
}

OpenDirectory::~OpenDirectory() {
  if (fd_ >= 0) ::close(fd_);
}

base::Result<OpenDirectory> OpenDirectory::open(const std::string& path) {
  const int fd = open_directory(path);
  if (fd < 0) return Status::storage("open", path, "directory", errno);
  return OpenDirectory(fd, path);
}

base::Result<OpenDirectory> OpenDirectory::open_below(const std::string& name) const {
  const int fd = is_entry(name) ? open_beneath(fd_, name, kFlags) : (errno = EINVAL, -1);
  if (fd < 0) return Status::storage("open", join(path_, name), "directory", errno);
  return OpenDirectory(fd, join(path_, name));
}

base::Result<OpenDirectory> OpenDirectory::open_parent() const {
  const int fd = ::openat(fd_, "..", kFlags);
  if (fd < 0) return Status::storage("open", join(path_, ".."), "directory", errno);
  return OpenDirectory(fd, path_.substr(0, path_.rfind('/')));
}

base::Result<OpenDirectory::Place> OpenDirectory::place() const {
  struct stat info;
  if (::fstat(fd_, &info) != 0) return Status::storage("fstat", path_, "", errno);
  Place place{static_cast<uint64_t>(info.st_dev), static_cast<uint64_t>(info.st_ino)};
#if defined(STATX_MNT_ID)
  struct statx more;
  const bool is_told = ::statx(fd_, "", AT_EMPTY_PATH, STATX_MNT_ID, &more) == 0 && (more.stx_mask & STATX_MNT_ID) != 0;
  if (is_told) place.mount = more.stx_mnt_id;
#endif
  return place;
}

base::Result<std::vector<std::string>> OpenDirectory::list() const {
  const int fd = ::openat(fd_, ".", kFlags);  // a new descriptor, with a read position of its own
  if (fd < 0) return Status::storage("opendir", path_, "", errno);
  return names_in(fd, path_);
}

base::Result<OpenDirectory::Entry> OpenDirectory::entry(const std::string& name) const {
  struct stat info;
  if (!is_entry(name)) {
    errno = EINVAL;
  } else if (::fstatat(fd_, name.c_str(), &info, AT_SYMLINK_NOFOLLOW) == 0) {
    const bool is_directory = S_ISDIR(info.st_mode);
    const int64_t bytes = is_directory || info.st_nlink < 2 ? info.st_size : 0;
    return Entry{is_directory, bytes, is_hidden_name(name) && may_be_held(info)};
  }
  return Status::storage("lstat", join(path_, name), "", errno);
}

Status OpenDirectory::remove_file(const std::string& name) const {
  return remove(name, 0);
}

Status OpenDirectory::remove_directory(const std::string& name) const {
  const auto until = std::chrono::steady_clock::now() + kLongestClose;
  while (true) {
    Status outcome = remove(name, AT_REMOVEDIR);
    const bool is_full = outcome.sys_errno() == ENOTEMPTY || outcome.sys_errno() == EEXIST;
    if (!is_full || std::chrono::steady_clock::now() >= until || !has_only_removed_files(name)) return outcome;
    std::this_thread::sleep_for(kBetweenTries);
  }
}

bool OpenDirectory::has_only_removed_files(const std::string& name) const {
  const base::Result<OpenDirectory> below = open_below(name);
  if (!below.is_ok()) return false;
  const base::Result<std::vector<std::string>> names = below.value().list();
  return names.is_ok() && std::all_of(names.value().begin(), names.value().end(), is_hidden_name);
}

Status OpenDirectory::remove(const std::string& name, int flags) const {
  if (!is_entry(name)) {
    errno = EINVAL;
  } else if (::unlinkat(fd_, name.c_str(), flags) == 0) {
    BCP_JOURNAL(removed(join(path_, name)));
    return Status::ok();
  } else if (errno == ENOENT) {
    return Status::ok();
  }
  return Status::storage(flags == 0 ? "unlink" : "rmdir", join(path_, name), "", errno);
}

Status OpenDirectory::sync() const {
  return sync_directory(fd_, path_);
}

}  // namespace bytecheckpoint::io
