// SPDX-License-Identifier: Apache-2.0
#include "csrc/io/file_system.h"

#include <sys/vfs.h>

#include <algorithm>
#include <cerrno>
#include <cstdint>
#include <iterator>

namespace bytecheckpoint::io {
namespace {

// From linux/magic.h and the sources of the file systems: not every system's header has all of them.
constexpr uint32_t kLocal[] = {
    0xEF53,      // ext2, ext3, ext4
    0x58465342,  // xfs
    0x9123683E,  // btrfs
    0x01021994,  // tmpfs
    0x858458F6,  // ramfs
    0x794C7630,  // overlayfs
    0x2FC12FC1,  // zfs
    0xF2F52010,  // f2fs
    0xCA451A4E,  // bcachefs
};

}  // namespace

bool is_on_local_file_system(const std::string& path) {
  struct statfs about{};
  int outcome = 0;
  do {
    outcome = ::statfs(path.c_str(), &about);
  } while (outcome != 0 && errno == EINTR);
  if (outcome != 0) return false;
  return std::find(std::begin(kLocal), std::end(kLocal), static_cast<uint32_t>(about.f_type)) != std::end(kLocal);
}

}  // namespace bytecheckpoint::io
