// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "csrc/base/status.h"

namespace bytecheckpoint::io {

/// `directory/name`.
std::string join(const std::string& directory, const std::string& name);

enum class EntryType { kAbsent, kRegular, kDirectory, kOther };
/// Of the name itself: a symbolic link is kOther.
base::Result<EntryType> entry_type(const std::string& path);

/// Which file or directory a path leads to: the same by all its names.
struct FileId {
  uint64_t device = 0;
  uint64_t inode = 0;
};
base::Result<FileId> file_id(const std::string& path);

/// Creates `path` and its missing parents; every new directory and the one it is entered in are synced, so that the
/// names survive power loss. An existing directory is fine; the one it is entered in is synced all the same, as a save
/// that died may have made it.
/// \param made  Gets the directories that this call has made, also if it fails; parents come first.
base::Status make_directories(const std::string& path, bool sync, std::vector<std::string>* made = nullptr);

/// Removes the directories that are empty, from the last one on; ends at the first that cannot be removed.
void remove_empty_directories(const std::vector<std::string>& paths);

/// Names in `path` without `.` and `..`, in the order of the file system.
base::Result<std::vector<std::string>> list_directory(const std::string& path);
/// The same of a directory that is open. \param fd  Is closed.
base::Result<std::vector<std::string>> names_in(int fd, const std::string& path);

/// fsync of a directory: makes names created, removed and renamed in it survive power loss.
/// \param supported  Set to false, with ok returned, where the file system cannot (EINVAL, ENOTSUP).
base::Status sync_directory(const std::string& path, bool* supported = nullptr);
/// The same of a directory that is open.
base::Status sync_directory(int fd, const std::string& path, bool* supported = nullptr);

/// Gives a file the name `to`, in place of what has that name. \returns kStorage, with ENOENT where `from` is gone.
base::Status rename_over(const std::string& from, const std::string& to);
/// The same where nothing has that name. \returns kStorage, with EEXIST if something has.
base::Status rename_new(const std::string& from, const std::string& to);

/// Removes a name; one that is already gone is fine.
base::Status remove_file(const std::string& path);

}  // namespace bytecheckpoint::io
