// SPDX-License-Identifier: Apache-2.0
#include "csrc/io/file_system.h"

#include <linux/magic.h>
#include <sys/stat.h>
#include <sys/statvfs.h>
#include <sys/vfs.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <iterator>
#include <optional>

#include "csrc/io/io_deadline.h"
#include "csrc/io/object_store.h"

namespace bytecheckpoint::io {

namespace {

using Type = unsigned long;

bool is_of_this_machine(Type type) {
  constexpr Type kXfs = 0x58465342, kZfs = 0x2fc12fc1, kF2fs = 0xf2f52010, kBcachefs = 0xca451a4e;
  constexpr Type kLocal[] = {TMPFS_MAGIC, RAMFS_MAGIC, EXT4_SUPER_MAGIC, BTRFS_SUPER_MAGIC, OVERLAYFS_SUPER_MAGIC, kXfs,
                             kZfs,        kF2fs,       kBcachefs};
  return std::find(std::begin(kLocal), std::end(kLocal), type) != std::end(kLocal);
}

/// The type of the network file system that a thread has asked last: each question is a message to its server. Only for
/// a moment, since a device number may be given to another file system.
struct Known {
  dev_t device = 0;
  Type type = 0;
  int64_t until_ns = 0;  // of the steady clock
};

thread_local Known known;

/// Returns the number of the type of a file system; nothing if it cannot be found out.
/// \param stat  Calls stat or fstat.
/// \param ask  Calls statfs or fstatfs.
template <typename Stat, typename Ask>
std::optional<Type> type_of(Stat stat, Ask ask) {
  constexpr int64_t kMomentNs = 1'000'000'000;
  struct stat info{};
  const bool has_device = stat(&info) == 0;
  const int64_t now_ns = std::chrono::nanoseconds(std::chrono::steady_clock::now().time_since_epoch()).count();
  if (has_device && info.st_dev == known.device && now_ns < known.until_ns) return known.type;
  struct statfs about{};
  int outcome = 0;
  do {
    outcome = ask(&about);
  } while (outcome != 0 && errno == EINTR);
  if (outcome != 0) return std::nullopt;
  const auto type = static_cast<Type>(about.f_type);
  if (has_device && !is_of_this_machine(type)) known = {info.st_dev, type, now_ns + kMomentNs};
  return type;
}

std::optional<Type> type_of(const std::string& path) {
  return type_of([&path](struct stat* info) { return ::stat(path.c_str(), info); },
                 [&path](struct statfs* about) { return ::statfs(path.c_str(), about); });
}

}  // namespace

bool is_in_memory(const std::string& path) {
  if (is_url(path)) {
    const base::Result<StorePlace> place = place_in_store(path);
    return place.is_ok() && place.value().store->in_memory() != nullptr;
  }
  const std::optional<Type> type = type_of(path);
  return type == static_cast<Type>(TMPFS_MAGIC) || type == static_cast<Type>(RAMFS_MAGIC);
}

bool has_lasting_inodes(const std::string& path) {
  constexpr Type kMadeUp[] = {FUSE_SUPER_MAGIC, SMB_SUPER_MAGIC, CIFS_SUPER_MAGIC, SMB2_SUPER_MAGIC, V9FS_MAGIC};
  const std::optional<Type> type = type_of(path);
  return type.has_value() && std::find(std::begin(kMadeUp), std::end(kMadeUp), *type) == std::end(kMadeUp);
}

bool is_local(const std::string& path) {
  const std::optional<Type> type = type_of(path);
  return type.has_value() && is_of_this_machine(*type);
}

bool is_in_user_space(int fd) {
  const std::optional<Type> type = type_of([fd](struct stat* info) { return ::fstat(fd, info); },
                                           [fd](struct statfs* about) { return ::fstatfs(fd, about); });
  return !type.has_value() || type == static_cast<Type>(FUSE_SUPER_MAGIC);
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
