// SPDX-License-Identifier: Apache-2.0
#include "csrc/io/file_system.h"

#include <linux/magic.h>
#include <sys/statvfs.h>
#include <sys/vfs.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <iterator>
#include <optional>

#include "csrc/io/io_deadline.h"

namespace bytecheckpoint::io {

namespace {

/// Returns the number of the type of a file system; nothing if it cannot be found out.
/// \param ask  Calls statfs or fstatfs.
template <typename Ask>
std::optional<unsigned long> type_of(Ask ask) {
  struct statfs about{};
  int outcome = 0;
  do {
    outcome = ask(&about);
  } while (outcome != 0 && errno == EINTR);
  if (outcome != 0) return std::nullopt;
  return static_cast<unsigned long>(about.f_type);
}

std::optional<unsigned long> type_of(const std::string& path) {
  return type_of([&path](struct statfs* about) { return ::statfs(path.c_str(), about); });
}

}  // namespace

bool is_in_memory(const std::string& path) {
  const std::optional<unsigned long> type = type_of(path);
  return type == static_cast<unsigned long>(TMPFS_MAGIC) || type == static_cast<unsigned long>(RAMFS_MAGIC);
}

bool has_lasting_inodes(const std::string& path) {
  constexpr unsigned long kMadeUp[] = {FUSE_SUPER_MAGIC, SMB_SUPER_MAGIC, CIFS_SUPER_MAGIC, SMB2_SUPER_MAGIC,
                                       V9FS_MAGIC};
  const std::optional<unsigned long> type = type_of(path);
  return type.has_value() && std::find(std::begin(kMadeUp), std::end(kMadeUp), *type) == std::end(kMadeUp);
}

bool is_local(const std::string& path) {
  constexpr unsigned long kXfs = 0x58465342, kZfs = 0x2fc12fc1, kF2fs = 0xf2f52010, kBcachefs = 0xca451a4e;
  constexpr unsigned long kLocal[] = {
      TMPFS_MAGIC, RAMFS_MAGIC, EXT4_SUPER_MAGIC, BTRFS_SUPER_MAGIC, OVERLAYFS_SUPER_MAGIC, kXfs,
      kZfs,        kF2fs,       kBcachefs};
  const std::optional<unsigned long> type = type_of(path);
  return type.has_value() && std::find(std::begin(kLocal), std::end(kLocal), *type) != std::end(kLocal);
}

bool is_in_user_space(int fd) {
  const std::optional<unsigned long> type = type_of([fd](struct statfs* about) { return ::fstatfs(fd, about); });
  return !type.has_value() || type == static_cast<unsigned long>(FUSE_SUPER_MAGIC);
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
