// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "csrc/base/status.h"

namespace bytecheckpoint::io {

/// Returns `directory/name`.
std::string join(const std::string& directory, const std::string& name);

/// Returns the directory that `path` is in: `.` for a single name, `/` for the root.
std::string parent_of(const std::string& path);
/// Returns the last name in `path`.
std::string name_of(const std::string& path);

/// What kind of entry a name is. kOther: a symbolic link, FIFO, socket or device.
enum class EntryType { kAbsent, kRegular, kDirectory, kOther };
/// Returns what has the name itself: a symbolic link is kOther. \returns kStorage if that cannot be found out.
base::Result<EntryType> entry_type(const std::string& path);

/// Whether `path` is a regular file, or leads to one by symbolic links.
base::Result<bool> leads_to_file(const std::string& path);
/// Returns what a symbolic link contains; nothing for anything else. \returns kStorage, with ENOENT if nothing is
/// there.
base::Result<std::optional<std::string>> link_target(const std::string& path);

/// Identifies a file or directory: all paths that lead to it have the same id.
struct FileId {
  uint64_t device = 0;
  uint64_t inode = 0;
};
base::Result<FileId> file_id(const std::string& path);

/// Creates `path` and its missing parents. With `sync`, syncs every new directory and its parent, so that the names
/// survive power loss. An existing directory is fine. Its parent is synced all the same, because a save that died may
/// have created it without a sync.
/// \param made  Receives the directories that this call has created, parents first, also if it fails.
/// \returns kStorage.
base::Status make_directories(const std::string& path, bool sync, std::vector<std::string>* made = nullptr);

/// Opens a directory for reading; where it may be seen late, after a second look. \returns the descriptor; -1 with
/// errno.
int open_directory(const std::string& path);

/// Removes empty directories, from the last one on, as `OpenDirectory::remove_directory` does it. Stops at the first
/// that cannot be removed.
void remove_empty_directories(const std::vector<std::string>& paths);

/// Returns the names in `path` without `.` and `..`, in the order of the file system.
base::Result<std::vector<std::string>> list_directory(const std::string& path);
/// The same for an open directory. \param fd  This call closes it.
base::Result<std::vector<std::string>> names_in(int fd, const std::string& path);

/// Syncs a directory, so that names created, removed and renamed in it survive power loss.
/// \param supported  Receives false, and the call succeeds, if the file system cannot do it (EINVAL, ENOTSUP).
base::Status sync_directory(const std::string& path, bool* supported = nullptr);
/// The same for an open directory.
base::Status sync_directory(int fd, const std::string& path, bool* supported = nullptr);

/// Renames `from` to `to`, and replaces what has that name. Atomic. \returns kStorage, with ENOENT if `from` is gone.
base::Status rename_over(const std::string& from, const std::string& to);
/// The same, but fails if something has the name `to`. \returns kStorage, with EEXIST if something has.
base::Status rename_new(const std::string& from, const std::string& to);

/// Gives the file `from` the name `to`, too (a hard link). Not durable until the directory is synced. A store, which
/// has no links, copies the object. \returns kStorage.
base::Status link_file(const std::string& from, const std::string& to);

/// Syncs the file at `path`. \returns kStorage.
base::Status sync_file(const std::string& path);

/// Tries `rename_new` on two files of these names, which nobody else may use, and removes them. \returns kStorage with
/// EOPNOTSUPP if the file system cannot do it.
base::Status try_rename_new(const std::string& from, const std::string& to);

/// Removes a name; no error if it is already gone.
base::Status remove_file(const std::string& path);

}  // namespace bytecheckpoint::io
