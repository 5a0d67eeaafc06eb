// SPDX-License-Identifier: Apache-2.0
#include "csrc/engine/lock_file.h"

#include <fcntl.h>
#include <pthread.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <mutex>

#include "csrc/base/failpoint.h"
#include "csrc/io/directory.h"

namespace bytecheckpoint::engine {
namespace {

using base::Code;
using base::Status;

// Descriptors of the locks that live, as fd + 1, so that a forked child can close them. Fixed and lock-free: a fork
// handler may neither allocate nor wait. A lock beyond the table is only missed by children that outlive us.
constexpr int kMaxTracked = 64;
std::atomic<int> tracked_fds[kMaxTracked];

void close_in_child() {
  for (auto& entry : tracked_fds) {
    if (const int fd = entry.exchange(0) - 1; fd >= 0) ::close(fd);
  }
}

bool locks_unsupported(int error) {
  return error == ENOLCK || error == EOPNOTSUPP || error == ENOSYS || error == EINVAL;
}

}  // namespace

LockFile& LockFile::operator=(LockFile&& other) noexcept {
  if (this != &other) {
    release();
    file_ = std::move(other.file_);
    tracked_ = std::exchange(other.tracked_, -1);
    owner_ = other.owner_;
  }
  return *this;
}

void LockFile::track() {
  static std::once_flag registered;
  std::call_once(registered, [] { ::pthread_atfork(nullptr, nullptr, close_in_child); });
  for (int i = 0; i < kMaxTracked; ++i) {
    int empty = 0;
    if (tracked_fds[i].compare_exchange_strong(empty, file_.fd() + 1)) {
      tracked_ = i;
      return;
    }
  }
}

base::Result<LockFile> LockFile::create(const std::string& path) {
  LockFile lock;
  BCP_ASSIGN_OR_RETURN(lock.file_, io::File::create(path, /*direct=*/false));
  lock.owner_ = ::getpid();
  lock.track();
  BCP_FAILPOINT(kBeginTmpCreated);
  const auto busy = [&] {
    (void)lock.remove();
    return Status::make(Code::kBusy, base::text("lock(", path, "): another save is beginning at this path"), path);
  };
  if (::flock(lock.file_.fd(), LOCK_EX | LOCK_NB) != 0) {
    if (errno == EWOULDBLOCK) return busy();
    if (!locks_unsupported(errno)) {
      const Status failure = Status::storage("flock", path, "", errno);
      (void)lock.remove();
      return failure;
    }
  }
  struct stat info;
  // Removed between creation and lock: a sweep took this save for a dead one. It never gets its name back.
  if (::fstat(lock.file_.fd(), &info) != 0 || info.st_nlink == 0) return busy();
  return lock;
}

base::Result<LockFile::Probe> LockFile::probe(const std::string& path, bool remove_if_free) {
  // Whatever else has such a name is no save's, and is left alone.
  BCP_ASSIGN_OR_RETURN(const io::EntryType type, io::entry_type(path));
  if (type != io::EntryType::kRegular) return Probe::kGone;
  int fd = ::open(path.c_str(), O_RDWR | O_NOFOLLOW | O_CLOEXEC | O_NONBLOCK);
  if (fd < 0 && errno == EACCES) fd = ::open(path.c_str(), O_RDONLY | O_NOFOLLOW | O_CLOEXEC | O_NONBLOCK);
  if (fd < 0 && errno == ENOENT) return Probe::kGone;
  if (fd < 0) return Status::storage("open", path, "tmp of another save", errno);
  Probe probe = Probe::kFree;
  Status outcome;
  if (::flock(fd, LOCK_EX | LOCK_NB) != 0 && !locks_unsupported(errno)) {
    if (errno != EWOULDBLOCK) outcome = Status::storage("flock", path, "tmp of another save", errno);
    probe = Probe::kHeld;
  }
  if (outcome.is_ok() && probe == Probe::kFree && remove_if_free) outcome = io::remove_file(path);
  // A child forked just now shares the lock; closing our descriptor alone would leave it with the child.
  if (probe == Probe::kFree) ::flock(fd, LOCK_UN);
  ::close(fd);
  if (!outcome.is_ok()) return outcome;
  return probe;
}

bool LockFile::is_ours() {
  if (file_.is_open() && owner_ == ::getpid()) return true;
  file_.disown();
  tracked_ = -1;
  return false;
}

Status LockFile::remove() {
  if (!is_ours()) return Status::ok();
  Status outcome = io::remove_file(file_.path());
  release();
  return outcome;
}

void LockFile::release() {
  if (!is_ours()) return;
  if (tracked_ >= 0) tracked_fds[tracked_].store(0);
  tracked_ = -1;
  (void)::flock(file_.fd(), LOCK_UN);  // also for a child that was forked just now and still shares it
  (void)file_.close();
}

}  // namespace bytecheckpoint::engine
