// SPDX-License-Identifier: Apache-2.0
#include "csrc/io/reserved_space.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>

#include "csrc/base/bytes.h"
#include "csrc/io/file_system.h"
#include "csrc/io/journal.h"

namespace bytecheckpoint::io {

using base::Status;
using base::text;

Status ReservedSpace::reserve(const Descriptor& file, int64_t bytes) {
  if (bytes <= 0) return Status::ok();
  int result;
  do {
    result = ::fallocate(file.fd(), FALLOC_FL_KEEP_SIZE, 0, bytes);
  } while (result != 0 && errno == EINTR);
  if (result == 0) {
    BCP_JOURNAL(reserved(file.fd(), file.path(), bytes));
    return Status::ok();
  }
  // Only these two errors mean that there is no space. All others mean that reserving is not supported.
  if (errno == ENOSPC || errno == EDQUOT) {
    return Status::storage("fallocate", file.path(), text(bytes, " bytes"), errno);
  }
  struct stat info;
  if (end_ < 0 && ::fstat(file.fd(), &info) == 0 && info.st_size == 0) end_ = 0;
  return check_room(file.path(), bytes);
}

Status ReservedSpace::truncate(const Descriptor& file, int64_t bytes) {
  if (end_ == bytes) return Status::ok();  // where nothing was reserved, one message less to a server that syncs for it
  int result;
  do {
    result = ::ftruncate(file.fd(), bytes);
  } while (result != 0 && errno == EINTR);
  if (result != 0) return Status::storage("ftruncate", file.path(), text(bytes, " bytes"), errno);
  BCP_JOURNAL(truncated(file.fd(), file.path(), bytes));
  return Status::ok();
}

void ReservedSpace::note_written(int64_t end) {
  int64_t before = end_;
  while (before >= 0 && before < end && !end_.compare_exchange_weak(before, end)) {
  }
}

}  // namespace bytecheckpoint::io
