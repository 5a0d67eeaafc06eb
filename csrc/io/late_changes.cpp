// SPDX-License-Identifier: Apache-2.0
#include "csrc/io/late_changes.h"

#include <sys/stat.h>

#include <cerrno>

#include "csrc/io/directory.h"
#include "csrc/io/file_system.h"
#include "csrc/io/object_store.h"

namespace bytecheckpoint::io {
namespace {

bool is_seen(const std::string& path) {
  struct stat info;
  return ::stat(path.c_str(), &info) == 0;
}

/// Lists a directory, after those above it that are not seen. Whoever may not list learns nothing.
void list_from_above(const std::string& directory) {
  const std::string above = parent_of(directory);
  if (!is_seen(directory) && above != directory) list_from_above(above);
  (void)list_directory(directory);
}

}  // namespace

void freshen(const std::string& directory) {
  if (!is_url(directory) && !is_local(directory)) (void)list_directory(directory);
}

bool look_anew(const std::string& directory) {
  if (is_url(directory)) return false;
  std::string seen = directory;
  while (!is_seen(seen) && parent_of(seen) != seen) seen = parent_of(seen);
  if (is_local(seen)) return false;
  list_from_above(parent_of(directory));
  list_from_above(directory);
  return true;
}

bool may_be_late(const base::Status& failure) {
  const int error = failure.sys_errno();
  return !failure.is_ok() && (error == ENOENT || error == ESTALE || error == ENODATA);
}

}  // namespace bytecheckpoint::io
