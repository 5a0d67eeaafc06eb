// SPDX-License-Identifier: Apache-2.0
#include "csrc/io/descriptor.h"

#include <fcntl.h>
#include <unistd.h>

#include <cerrno>
#include <mutex>

#include "csrc/base/bytes.h"
#include "csrc/io/file_system.h"
#include "csrc/io/journal.h"

namespace bytecheckpoint::io {
namespace {

using base::Status;

/// Held while a file is opened once more.
std::mutex reopening;

}  // namespace

int open_retrying(const char* path, int flags, mode_t mode, int directory) {
  int fd;
  do {
    fd = ::openat(directory, path, flags | O_CLOEXEC, mode);
  } while (fd < 0 && errno == EINTR);
  return fd;
}

Descriptor& Descriptor::operator=(Descriptor&& other) noexcept {
  if (this != &other) {
    close_all();
    path_ = std::move(other.path_);
    fd_ = std::exchange(other.fd_, -1);
    buffered_ = std::exchange(other.buffered_, -1);
    direct_ = other.direct_.load();
  }
  return *this;
}

void Descriptor::start_direct() {
  const int flags = fd_ < 0 ? -1 : ::fcntl(fd_, F_GETFL);
  if (flags >= 0 && ::fcntl(fd_, F_SETFL, flags | O_DIRECT) == 0) direct_ = true;
}

Status Descriptor::stop_direct() {
  const std::lock_guard lock(reopening);
  if (!direct_) return Status::ok();  // another thread was first
  const int flags = ::fcntl(fd_, F_GETFL);
  if (flags < 0) return Status::storage("fcntl", path_, "", errno);
  if (!is_in_user_space(fd_)) {
    ::fcntl(fd_, F_SETFL, flags & ~O_DIRECT);
  } else if (buffered_ < 0) {
    const std::string link = base::text("/proc/self/fd/", fd_);
    buffered_ = open_retrying(link.c_str(), flags & O_ACCMODE, 0);
    if (buffered_ < 0) return Status::storage("open", path_, "again, without O_DIRECT", errno);
  }
  // The descriptors change first: a thread that reads direct_ as false relies on that.
  direct_ = false;
  return Status::ok();
}

void Descriptor::forget_direct() {
  if (buffered_ >= 0) ::close(std::exchange(fd_, std::exchange(buffered_, -1)));
}

Status Descriptor::sync() {
  if (fd_ < 0) return Status::ok();
  if (::fsync(fd_) != 0) return Status::storage("fsync", path_, "", errno);
  if (buffered_ >= 0 && ::fsync(buffered_) != 0) {
    return Status::storage("fsync", path_, "without O_DIRECT", errno);
  }
  BCP_JOURNAL(synced(fd_, path_));
  return Status::ok();
}

Status Descriptor::flush() {
  // Closing any descriptor of the file flushes it. Locks (flock) belong to the open file, so they stay with the other
  // descriptor.
  for (const int fd : {fd_, buffered_}) {
    if (fd < 0) continue;
    const int same = ::fcntl(fd, F_DUPFD_CLOEXEC, 0);
    if (same < 0) return Status::storage("dup", path_, "", errno);
    if (::close(same) != 0) return Status::storage("close", path_, "", errno);
  }
  return Status::ok();
}

int Descriptor::close_all() {
  int error = 0;
  for (const int fd : {std::exchange(buffered_, -1), std::exchange(fd_, -1)}) {
    // Linux frees the descriptor whatever close returns: never retried.
    if (fd >= 0 && ::close(fd) != 0 && error == 0) error = errno;
  }
  return error;
}

Status Descriptor::close() {
  const int error = close_all();
  return error == 0 ? Status::ok() : Status::storage("close", path_, "", error);
}

}  // namespace bytecheckpoint::io
