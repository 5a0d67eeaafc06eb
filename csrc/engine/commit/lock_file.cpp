// SPDX-License-Identifier: Apache-2.0
#include "csrc/engine/commit/lock_file.h"

#include <fcntl.h>
#include <pthread.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <sys/sysmacros.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <cstdio>
#include <ctime>
#include <fstream>
#include <mutex>

#include "csrc/base/failpoint.h"
#include "csrc/io/directory.h"

namespace bytecheckpoint::engine {
namespace {

using base::Code;
using base::Status;

// Descriptors of all locks, as fd + 1, so that a forked child can close them. The table is fixed and lock-free, because
// a fork handler may neither allocate nor wait. A lock that finds no room in it is not closed in children, which
// matters only for children that outlive this process.
constexpr int kMaxTracked = 64;
std::atomic<int> tracked_fds[kMaxTracked];

void close_in_child() {
  for (auto& entry : tracked_fds) {
    if (const int fd = entry.exchange(0) - 1; fd >= 0) ::close(fd);
  }
}

/// Whether an error says that another machine has removed the file. Some file systems tell by the lock.
bool is_of_removed(int error) {
  return error == ENOENT || error == ESTALE;
}

bool locks_unsupported(int error) {
  return error == ENOLCK || error == EOPNOTSUPP || error == ENOSYS || error == EINVAL;
}

/// Whether /proc/locks lists a flock of this file. It has those of all processes that this one can see.
bool is_listed(const struct stat& info) {
  std::ifstream locks("/proc/locks");
  for (std::string line; std::getline(locks, line);) {
    unsigned major_number = 0, minor_number = 0;
    unsigned long long inode = 0;
    // 7: FLOCK  ADVISORY  WRITE 12345 fe:00:131074 0 EOF
    if (std::sscanf(line.c_str(), "%*d: FLOCK %*s %*s %*d %x:%x:%llu", &major_number, &minor_number, &inode) != 3) {
      continue;
    }
    if (inode != info.st_ino) continue;
    // File systems without a device (btrfs, overlayfs) may list another number than stat gives.
    if (major_number == 0 && major(info.st_dev) == 0) return true;
    if (major_number == major(info.st_dev) && minor_number == minor(info.st_dev)) return true;
  }
  return false;
}

/// Takes the lock of a file if nobody keeps it. Whoever looks at a save of another PID namespace has a shared lock for
/// some microseconds, so this asks again for some milliseconds. \returns 0 or the errno.
int try_lock(int fd) {
  constexpr int kAsks = 10;
  constexpr timespec kPause{0, 2'000'000};
  for (int left = kAsks;; --left) {
    if (::flock(fd, LOCK_EX | LOCK_NB) == 0) return 0;
    if (errno != EWOULDBLOCK || left == 1) return errno;
    ::nanosleep(&kPause, nullptr);
  }
}

/// Whether the list of flocks has those of all processes of this host. In another PID namespace than the first one, as
/// in a container, those of other namespaces are missing.
bool lists_all_flocks() {
  constexpr ino_t kFirstPidNamespace = 0xEFFFFFFC;  // fixed in Linux: PROC_PID_INIT_INO
  struct stat info;
  return ::stat("/proc/self/ns/pid", &info) == 0 && info.st_ino == kFirstPidNamespace &&
         ::access("/proc/locks", R_OK) == 0;
}

/// Whether somebody holds the lock of a file, found out by taking a shared one for a moment.
bool is_held_by_trial(int fd) {
  if (::flock(fd, LOCK_SH | LOCK_NB) != 0) return errno == EWOULDBLOCK;
  ::flock(fd, LOCK_UN);
  return false;
}

/// Whether a lock on the range of the whole file would have to wait. Network file systems implement flock as such a
/// lock, and their servers know those of all hosts. Local file systems keep the two kinds apart: there the answer is
/// no.
bool is_locked_elsewhere(int fd) {
  struct flock wanted{};
  wanted.l_type = F_WRLCK;
  wanted.l_whence = SEEK_SET;
  return ::fcntl(fd, F_OFD_GETLK, &wanted) == 0 && wanted.l_type != F_UNLCK;
}

}  // namespace

LockFile& LockFile::operator=(LockFile&& other) noexcept {
  if (this != &other) {
    release();
    file_ = std::move(other.file_);
    name_ = std::move(other.name_);
    directory_ = std::move(other.directory_);
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

base::Result<LockFile> LockFile::create(const std::string& path, const std::string& about, bool is_again) {
  base::Result<io::DiskFile> file = io::DiskFile::create(path, /*direct=*/false);
  if (is_again && file.status().sys_errno() == EEXIST) {
    BCP_RETURN_IF_ERROR(io::remove_file(path));
    file = io::DiskFile::create(path, /*direct=*/false);
  }
  LockFile made;
  BCP_ASSIGN_OR_RETURN(made.file_, std::move(file));
  return lock(std::move(made), about);
}

base::Result<LockFile> LockFile::create(std::shared_ptr<const io::OpenDirectory> in, const std::string& name) {
  LockFile made;
  BCP_ASSIGN_OR_RETURN(made.file_, io::DiskFile::create(*in, name));
  made.name_ = name;
  made.directory_ = std::move(in);
  return lock(std::move(made), "");
}

base::Result<LockFile> LockFile::lock(LockFile lock, const std::string& about) {
  const std::string path = lock.file_.path();
  lock.owner_ = ::getpid();
  lock.track();
  BCP_FAILPOINT(kBeginTmpCreated);
  const auto busy = [&] {
    (void)lock.remove();
    return Status::make(Code::kBusy, base::text("lock(", path, "): another save is beginning at this path"), path);
  };
  Status flushed;
  if (!about.empty()) flushed = lock.file_.write_at({about, "\n"}, 0);
  // Some file systems create the file for other machines only now. Whoever looks at others must be seen by them.
  // Nothing may be left to write: if the name is removed meanwhile, that would bring it back.
  if (flushed.is_ok()) flushed = lock.file_.flush();
  if (!flushed.is_ok()) {
    if (is_of_removed(flushed.sys_errno())) return busy();
    (void)lock.remove();
    return flushed;
  }
  if (const int error = try_lock(lock.file_.fd()); error != 0) {
    if (error == EWOULDBLOCK || is_of_removed(error)) return busy();
    if (!locks_unsupported(error)) {
      const Status failure = Status::storage("flock", path, "", error);
      (void)lock.remove();
      return failure;
    }
  }
  // Removed between creation and lock: a sweep took this save for a dead one. The tmp never gets its name back.
  if (!lock.has_name()) return busy();
  return lock;
}

base::Result<LockFile::Probe> LockFile::probe(const std::string& path, bool remove_if_free) {
  // Anything but a regular file with such a name is not ours, and is left alone.
  BCP_ASSIGN_OR_RETURN(const io::EntryType type, io::entry_type(path));
  if (type != io::EntryType::kRegular) return Probe::kGone;
  int fd = ::open(path.c_str(), O_RDWR | O_NOFOLLOW | O_CLOEXEC | O_NONBLOCK);
  if (fd < 0 && errno == EACCES) fd = ::open(path.c_str(), O_RDONLY | O_NOFOLLOW | O_CLOEXEC | O_NONBLOCK);
  if (fd < 0 && is_of_removed(errno)) return Probe::kGone;
  if (fd < 0) return Status::storage("open", path, "tmp of another save", errno);
  Probe probe = Probe::kFree;
  Status outcome;
  if (const int error = try_lock(fd); error != 0 && !locks_unsupported(error)) {
    if (error != EWOULDBLOCK && !is_of_removed(error)) {
      outcome = Status::storage("flock", path, "tmp of another save", error);
    }
    probe = is_of_removed(error) ? Probe::kGone : Probe::kHeld;
  }
  if (outcome.is_ok() && probe == Probe::kFree && remove_if_free) outcome = io::remove_file(path);
  // Unlocks before the close: a child that was forked just now shares the lock, and would keep it if we only closed our
  // descriptor.
  if (probe == Probe::kFree) ::flock(fd, LOCK_UN);
  ::close(fd);
  if (!outcome.is_ok()) return outcome;
  return probe;
}

base::Result<bool> LockFile::is_seen_held(const std::string& path) {
  const int fd = ::open(path.c_str(), O_RDONLY | O_NOFOLLOW | O_CLOEXEC | O_NONBLOCK);
  if (fd < 0 && (is_of_removed(errno) || errno == ELOOP)) return false;
  if (fd < 0) return Status::storage("open", path, "tmp of another save", errno);
  struct stat info;
  bool held = false;
  if (::fstat(fd, &info) == 0 && S_ISREG(info.st_mode)) {
    held = is_listed(info) || is_locked_elsewhere(fd) || (!lists_all_flocks() && is_held_by_trial(fd));
  }
  ::close(fd);
  return held;
}

bool LockFile::has_name() {
  return file_.has_name();
}

bool LockFile::is_ours() {
  if (file_.is_open() && owner_ == ::getpid()) return true;
  file_.disown();
  tracked_ = -1;
  return false;
}

Status LockFile::remove() {
  if (!is_ours()) return Status::ok();
  Status outcome = directory_ != nullptr ? directory_->remove_file(name_) : io::remove_file(file_.path());
  release();
  return outcome;
}

void LockFile::release() {
  if (!is_ours()) return;
  if (tracked_ >= 0) tracked_fds[tracked_].store(0);
  tracked_ = -1;
  (void)::flock(file_.fd(), LOCK_UN);  // a child that was forked just now shares the lock
  (void)file_.close();                 // its contents were synced or flushed, or nobody needs them
}

}  // namespace bytecheckpoint::engine
