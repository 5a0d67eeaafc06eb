// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <string>

#include "csrc/base/status.h"

namespace bytecheckpoint::io {

/// Whether `path` is in the memory of this machine: on a file system there (tmpfs, ramfs), or a URL of `MemoryObjects`.
/// False if that cannot be found out.
bool is_in_memory(const std::string& path);
/// \returns the same; kStorage with ETIMEDOUT if the file system has not answered within `io_timeout_s` seconds; 0: it
/// waits for ever.
base::Result<bool> is_in_memory(const std::string& path, double io_timeout_s);

/// Whether a file keeps its inode number for as long as it exists, on every machine that sees it. File systems in user
/// space and network shares of other systems make up numbers as they go. False if that cannot be found out.
bool has_lasting_inodes(const std::string& path);

/// Whether `path` is on a file system of this machine alone, which shows every change at once. No for those of networks
/// and in user space, and for any that is not known.
bool is_local(const std::string& path);

/// Whether an open file is on a file system in user space (FUSE), which keeps data by descriptor and not by file. True
/// if that cannot be found out: only there may an open file be gone.
bool is_in_user_space(int fd);

/// \returns kStorage with ENOSPC if the file system of `path` says that it has less than `bytes` left for this user. A
/// file system that says nothing counts as having room.
base::Status check_room(const std::string& path, int64_t bytes);

}  // namespace bytecheckpoint::io
