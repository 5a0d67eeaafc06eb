// SPDX-License-Identifier: Apache-2.0
#include "csrc/io/open_beneath.h"

#include <fcntl.h>
#include <linux/openat2.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <cerrno>
#include <utility>

namespace bytecheckpoint::io {
namespace {

constexpr int kAlways = O_CLOEXEC | O_NOCTTY | O_NONBLOCK;
/// openat2 fails with EAGAIN if something is renamed meanwhile: then we try again, so many times.
constexpr int kMaxTries = 100;

int fail(int error) {
  errno = error;
  return -1;
}

/// Whether the string is not empty, and has no zero byte, at which C would end it.
bool is_name(const std::string& name) {
  return !name.empty() && name.find('\0') == std::string::npos;
}

/// Whether `..` is in the name, also where the name would come back into the directory: without links nobody needs such
/// names.
bool goes_up(const std::string& name) {
  return ("/" + name + "/").find("/../") != std::string::npos;
}

int open_at(int directory, const std::string& name, int flags) {
  int fd;
  do {
    fd = ::openat(directory, name.c_str(), flags | O_NOFOLLOW | kAlways);
  } while (fd < 0 && errno == EINTR);
  return fd;
}

}  // namespace

int open_beneath(int directory, const std::string& name, int flags) {
  if (!is_name(name)) return fail(EINVAL);
  if (goes_up(name)) return fail(EXDEV);
  open_how how{};
  how.flags = static_cast<uint64_t>(flags | kAlways);
  how.resolve = RESOLVE_BENEATH | RESOLVE_NO_SYMLINKS | RESOLVE_NO_MAGICLINKS;
  long fd = -1;
  int tries = 0;
  do {
    fd = ::syscall(SYS_openat2, directory, name.c_str(), &how, sizeof how);
  } while (fd < 0 && (errno == EINTR || (errno == EAGAIN && ++tries < kMaxTries)));
  if (fd < 0 && (errno == ENOSYS || errno == EPERM)) return open_beneath_by_steps(directory, name, flags);
  return static_cast<int>(fd);
}

int open_beneath_by_steps(int directory, const std::string& name, int flags) {
  if (!is_name(name)) return fail(EINVAL);
  if (name.front() == '/' || goes_up(name)) return fail(EXDEV);
  int at = directory;
  for (size_t begin = 0;;) {
    const size_t slash = name.find('/', begin);
    const bool is_last = slash == std::string::npos;
    const std::string step = name.substr(begin, is_last ? slash : slash - begin);
    int next = open_at(at, step.empty() ? "." : step, is_last ? flags : O_RDONLY | O_DIRECTORY);
    if (next < 0 && !is_last && errno == EACCES) next = open_at(at, step.empty() ? "." : step, O_PATH | O_DIRECTORY);
    const int error = errno;
    if (at != directory) ::close(at);
    errno = error;
    if (next < 0 || is_last) return next;
    at = next;
    begin = slash + 1;
  }
}

}  // namespace bytecheckpoint::io
