// SPDX-License-Identifier: Apache-2.0
#include "csrc/io/file_system.h"

#include <linux/magic.h>
#include <sys/statvfs.h>
#include <sys/vfs.h>
#include <unistd.h>

#include <cerrno>

#include "csrc/io/io_deadline.h"

namespace bytecheckpoint::io {

bool is_in_memory(const std::string& path) {
  struct statfs about{};
  int outcome = 0;
  do {
    outcome = ::statfs(path.c_str(), &about);
  } while (outcome != 0 && errno == EINTR);
  return outcome == 0 && (about.f_type == TMPFS_MAGIC || static_cast<unsigned long>(about.f_type) == RAMFS_MAGIC);
}

base::Result<bool> is_in_memory(const std::string& path, double io_timeout_s) {
  return run_with_deadline(io_timeout_s, "statfs", path, [path]() -> base::Result<bool> { return is_in_memory(path); });
}

base::Status check_room(const std::string& path, int64_t bytes) {
  struct statvfs about{};
  int outcome = 0;
  do {
    outcome = ::statvfs(path.c_str(), &about);
  } while (outcome != 0 && errno == EINTR);
  // Some network and user-space file systems report no blocks.
  if (outcome != 0 || about.f_blocks == 0) return base::Status::ok();
  const auto blocks_wanted = (static_cast<uint64_t>(bytes) + about.f_frsize - 1) / about.f_frsize;
  const uint64_t blocks_free = ::geteuid() == 0 ? about.f_bfree : about.f_bavail;
  if (blocks_wanted <= blocks_free) return base::Status::ok();
  return base::Status::storage("statvfs", path,
                               base::text(bytes, " bytes needed, but only ", blocks_free * about.f_frsize, " are free"),
                               ENOSPC);
}

}  // namespace bytecheckpoint::io
