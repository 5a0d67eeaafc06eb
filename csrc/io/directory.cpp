// SPDX-License-Identifier: Apache-2.0
#include "csrc/io/directory.h"

#include <dirent.h>
#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <climits>
#include <cstdio>
#include <iterator>
#include <memory>

#include "csrc/base/bytes.h"
#include "csrc/base/failpoint.h"
#include "csrc/io/descriptor.h"
#include "csrc/io/disk_file.h"
#include "csrc/io/journal.h"
#include "csrc/io/late_changes.h"
#include "csrc/io/object_store.h"
#include "csrc/io/open_directory.h"

namespace bytecheckpoint::io {

using base::Status;

std::string join(const std::string& directory, const std::string& name) {
  return !directory.empty() && directory.back() == '/' ? directory + name : directory + "/" + name;
}

std::string name_of(const std::string& path) {
  const std::string trimmed = path.substr(0, path.find_last_not_of('/') + 1);
  return trimmed.substr(trimmed.rfind('/') + 1);
}

std::string parent_of(const std::string& path) {
  size_t end = path.find_last_not_of('/');
  end = end == std::string::npos ? 0 : path.rfind('/', end);
  return end == std::string::npos ? "." : end == 0 ? "/" : path.substr(0, end);
}

int open_directory(const std::string& path) {
  return call_until_seen(parent_of(path), [&] { return ::open(path.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC); });
}

namespace {

/// Syncs a directory that others created. No error if we may not read it: then it is theirs to sync.
Status sync_entry(const std::string& directory) {
  Status synced = sync_directory(directory);
  const int error = synced.sys_errno();
  return error == EACCES || error == EPERM || error == EROFS ? Status::ok() : synced;
}

}  // namespace

base::Result<EntryType> entry_type(const std::string& path) {
  if (is_url(path)) {
    BCP_ASSIGN_OR_RETURN(const StorePlace place, place_in_store(path));
    const base::Result<ObjectStore::Object> found = place.store->open(place.name);
    if (found.is_ok()) return EntryType::kRegular;
    return found.status().sys_errno() == ENOENT ? base::Result<EntryType>(EntryType::kAbsent) : found.status();
  }
  struct stat info;
  if (call_until_seen(parent_of(path), [&] { return ::lstat(path.c_str(), &info); }) != 0) {
    if (errno == ENOENT) return EntryType::kAbsent;
    return Status::storage("lstat", path, "", errno);
  }
  if (S_ISREG(info.st_mode)) return EntryType::kRegular;
  return S_ISDIR(info.st_mode) ? EntryType::kDirectory : EntryType::kOther;
}

base::Result<bool> leads_to_file(const std::string& path) {
  struct stat info;
  if (::stat(path.c_str(), &info) == 0) return S_ISREG(info.st_mode);
  if (errno == ENOENT || errno == ENOTDIR) return false;
  return Status::storage("stat", path, "", errno);
}

base::Result<std::optional<std::string>> link_target(const std::string& path) {
  std::string target(PATH_MAX, '\0');
  const ssize_t size = ::readlink(path.c_str(), target.data(), target.size());
  if (size < 0 && errno == EINVAL) return std::optional<std::string>();
  if (size < 0) return Status::storage("readlink", path, "", errno);
  target.resize(static_cast<size_t>(size));
  return std::make_optional(std::move(target));
}

base::Result<FileId> file_id(const std::string& path) {
  struct stat info;
  if (::stat(path.c_str(), &info) != 0) return Status::storage("stat", path, "", errno);
  return FileId{static_cast<uint64_t>(info.st_dev), static_cast<uint64_t>(info.st_ino)};
}

namespace {

/// How often the directories are created again if one that was found is gone: a save that failed had created it, and
/// removed it.
constexpr int kMaxAttempts = 8;

Status try_make_directories(const std::string& path, bool sync, std::vector<std::string>* made) {
  const std::string parent = parent_of(path);
  struct stat info;
  if (::stat(path.c_str(), &info) == 0) {
    if (!S_ISDIR(info.st_mode)) return Status::storage("mkdir", path, "exists and is not a directory", ENOTDIR);
    // Directories are created and synced one by one, so only the last of them can be missing on the disk.
    return sync ? sync_entry(parent) : Status::ok();
  }
  if (errno != ENOENT) return Status::storage("stat", path, "", errno);
  BCP_RETURN_IF_ERROR(try_make_directories(parent, sync, made));
  // EEXIST: another rank or save was faster.
  if (::mkdir(path.c_str(), 0777) == 0) {
    if (made != nullptr) made->push_back(path);
    BCP_JOURNAL(made_directory(path));
  } else if (errno != EEXIST) {
    return Status::storage("mkdir", path, "", errno);
  }
  BCP_FAILPOINT(kBeginDirectoryMade);
  if (!sync) return Status::ok();
  BCP_RETURN_IF_ERROR(sync_directory(path));
  return sync_directory(parent);
}

}  // namespace

Status make_directories(const std::string& path, bool sync, std::vector<std::string>* made) {
  for (int attempt = 1;; ++attempt) {
    Status outcome = try_make_directories(path, sync, made);
    if (outcome.sys_errno() != ENOENT || attempt == kMaxAttempts) return outcome;
    look_anew(parent_of(path));  // another machine may have made it
  }
}

void remove_empty_directories(const std::vector<std::string>& paths) {
  for (auto path = paths.rbegin(); path != paths.rend(); ++path) {
    const auto parent = OpenDirectory::open(parent_of(*path));
    if (!parent.is_ok()) return;
    const Status outcome = parent.value().remove_directory(name_of(*path));
    if (!outcome.is_ok()) return;  // somebody uses it
  }
}

base::Result<std::vector<std::string>> list_directory(const std::string& path) {
  if (is_url(path)) {
    BCP_ASSIGN_OR_RETURN(const StorePlace place, place_in_store(path));
    return place.store->list(place.name);
  }
  const int fd = open_directory(path);
  if (fd < 0) return Status::storage("opendir", path, "", errno);
  return names_in(fd, path);
}

base::Result<std::vector<std::string>> names_in(int fd, const std::string& path) {
  struct CloseDirectory {
    void operator()(DIR* directory) const { ::closedir(directory); }
  };
  std::unique_ptr<DIR, CloseDirectory> directory(::fdopendir(fd));
  if (directory == nullptr) {
    const int error = errno;
    ::close(fd);
    return Status::storage("opendir", path, "", error);
  }
  std::vector<std::string> names;
  for (;;) {
    errno = 0;
    const dirent* entry = ::readdir(directory.get());
    if (entry == nullptr) {
      if (errno != 0) return Status::storage("readdir", path, "", errno);
      return names;
    }
    const std::string name = entry->d_name;
    if (name != "." && name != "..") names.push_back(name);
  }
}

Status sync_directory(const std::string& path, bool* supported) {
  if (is_url(path)) return Status::ok();  // a store has no directories
  const int fd = open_directory(path);
  if (fd < 0) return Status::storage("open", path, "directory", errno);
  Status synced = sync_directory(fd, path, supported);
  ::close(fd);
  return synced;
}

Status sync_directory(int fd, const std::string& path, bool* supported) {
  const bool done = ::fsync(fd) == 0;
  const bool is_refused = !done && (errno == EINVAL || errno == ENOTSUP);
  if (!done && !is_refused) return Status::storage("fsync", path, "directory", errno);
  if (supported != nullptr) *supported = done;
  if (done) BCP_JOURNAL(synced_directory(path));
  return Status::ok();
}

Status rename_over(const std::string& from, const std::string& to) {
  if (::rename(from.c_str(), to.c_str()) != 0) return Status::storage("rename", from, base::text("to ", to), errno);
  BCP_JOURNAL(renamed(from, to));
  return Status::ok();
}

Status rename_new(const std::string& from, const std::string& to) {
  if (::renameat2(AT_FDCWD, from.c_str(), AT_FDCWD, to.c_str(), RENAME_NOREPLACE) == 0) {
    BCP_JOURNAL(renamed(from, to));
    return Status::ok();
  }
  // Not supported there. link has the same effect: it fails if the name exists.
  const int error = errno;
  const Status linked = error == EINVAL || error == ENOSYS ? link_file(from, to) : Status::ok();
  if ((error != EINVAL && error != ENOSYS) || !linked.is_ok()) {
    return Status::storage("rename", from, base::text("to ", to), linked.is_ok() ? error : linked.sys_errno());
  }
  if (::unlink(from.c_str()) == 0) BCP_JOURNAL(removed(from));
  return Status::ok();
}

Status link_file(const std::string& from, const std::string& to) {
  if (is_url(to)) {
    BCP_ASSIGN_OR_RETURN(const StorePlace place, place_in_store(to));
    return place.store->copy(from, place.name);
  }
  if (::link(from.c_str(), to.c_str()) != 0) return Status::storage("link", from, base::text("to ", to), errno);
  BCP_JOURNAL(linked(from, to));
  return Status::ok();
}

Status sync_file(const std::string& path) {
  if (is_url(path)) return Status::ok();  // what a store has is durable
  Descriptor file(open_retrying(path.c_str(), O_RDONLY | O_NOFOLLOW, 0), path, /*direct=*/false);
  if (!file.is_open()) return Status::storage("open", path, "", errno);
  return file.sync();
}

Status try_rename_new(const std::string& from, const std::string& to) {
  base::Result<DiskFile> made = DiskFile::create(from, /*direct=*/false);
  Status renamed = made.status();
  if (renamed.is_ok()) renamed = made.value().close();
  if (renamed.is_ok()) renamed = rename_new(from, to);
  for (const std::string& path : {from, to}) {
    const Status removed = remove_file(path);
    if (renamed.is_ok()) renamed = removed;
  }
  constexpr int kCannot[] = {EPERM, EINVAL, ENOSYS, ENOTSUP, EMLINK, EIO};
  const int error = renamed.sys_errno();
  if (!renamed.is_ok() && std::find(std::begin(kCannot), std::end(kCannot), error) != std::end(kCannot)) {
    return Status::storage(
        "rename", parent_of(to),
        base::text("this file system has neither hard links (errno ", error, ") nor a rename that replaces nothing"),
        EOPNOTSUPP);
  }
  return renamed;
}

Status remove_file(const std::string& path) {
  if (::unlink(path.c_str()) == 0) {
    BCP_JOURNAL(removed(path));
    return Status::ok();
  }
  return errno == ENOENT ? Status::ok() : Status::storage("unlink", path, "", errno);
}

}  // namespace bytecheckpoint::io
