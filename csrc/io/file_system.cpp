// SPDX-License-Identifier: Apache-2.0
#include "csrc/io/file_system.h"

#include <linux/magic.h>
#include <sys/vfs.h>

#include <cerrno>

namespace bytecheckpoint::io {

bool is_in_memory(const std::string& path) {
  struct statfs about{};
  int outcome = 0;
  do {
    outcome = ::statfs(path.c_str(), &about);
  } while (outcome != 0 && errno == EINTR);
  return outcome == 0 && (about.f_type == TMPFS_MAGIC || static_cast<unsigned long>(about.f_type) == RAMFS_MAGIC);
}

}  // namespace bytecheckpoint::io
