// SPDX-License-Identifier: Apache-2.0
#include "csrc/io/late_freeing.h"

#include <fcntl.h>
#include <linux/magic.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/vfs.h>
#include <unistd.h>

#include <condition_variable>
#include <cstddef>
#include <deque>
#include <system_error>

#include "csrc/base/mutex.h"
#include "csrc/base/named_thread.h"
#include "csrc/base/per_process.h"
#include "csrc/io/directory.h"

namespace bytecheckpoint::io {
namespace {

using base::Status;

/// Smaller files are freed at once: that takes less time than to put it off.
constexpr int64_t kLeastBytes = 4 << 20;
constexpr size_t kMappedBytes = 1;

/// Pages to unmap, one of each file that has lost its name, and the thread that does.
struct Backlog {
  base::Mutex mutex;
  std::condition_variable freed;  // tells that there is no thread any more
  std::deque<void*> pages BCP_GUARDED_BY(mutex);
  bool has_thread BCP_GUARDED_BY(mutex) = false;

  void run() {
    base::MutexLock lock(mutex);
    while (!pages.empty()) {
      void* const page = pages.front();
      pages.pop_front();
      lock.unlock();
      ::munmap(page, kMappedBytes);
      lock.lock();
    }
    has_thread = false;
    freed.notify_all();
  }
};

bool keeps_files_without_a_name(int fd) {
  struct statfs about{};
  if (::fstatfs(fd, &about) != 0) return false;
  const auto type = static_cast<unsigned long>(about.f_type);
  return type == EXT4_SUPER_MAGIC || type == XFS_SUPER_MAGIC || type == BTRFS_SUPER_MAGIC || type == TMPFS_MAGIC ||
         type == F2FS_SUPER_MAGIC;
}

/// Maps a page of a file whose space is worth it; null if that cannot be. Nothing of this may fail the removal.
void* map_large_file(const std::string& path) {
  const int fd = ::open(path.c_str(), O_RDONLY | O_NOFOLLOW | O_CLOEXEC | O_NONBLOCK);
  if (fd < 0) return nullptr;
  struct stat info{};
  const bool is_worth_it = ::fstat(fd, &info) == 0 && S_ISREG(info.st_mode) && info.st_nlink == 1 &&
                           static_cast<int64_t>(info.st_blocks) * 512 >= kLeastBytes && keeps_files_without_a_name(fd);
  void* page = is_worth_it ? ::mmap(nullptr, kMappedBytes, PROT_NONE, MAP_PRIVATE, fd, 0) : MAP_FAILED;
  ::close(fd);
  if (page != MAP_FAILED && ::madvise(page, kMappedBytes, MADV_DONTFORK) != 0) {
    ::munmap(page, kMappedBytes);
    page = MAP_FAILED;
  }
  return page == MAP_FAILED ? nullptr : page;
}

}  // namespace

Status remove_and_free_later(const std::string& path) {
  void* const page = map_large_file(path);
  Status removed = remove_file(path);
  if (page == nullptr) return removed;
  Backlog& backlog = base::of_process<Backlog>();
  const base::MutexLock lock(backlog.mutex);
  backlog.pages.push_back(page);
  if (backlog.has_thread) return removed;
  try {
    // Nobody waits for this thread at the end of the process, when the system frees what is left.
    base::named_thread("bcp-free", [&backlog] { backlog.run(); }).detach();
    backlog.has_thread = true;
  } catch (const std::system_error&) {  // no thread can be started: frees it here
    backlog.pages.pop_back();
    ::munmap(page, kMappedBytes);
  }
  return removed;
}

void wait_until_freed() {
  Backlog& backlog = base::of_process<Backlog>();
  base::MutexLock lock(backlog.mutex);
  backlog.freed.wait(lock, [&] { return !backlog.has_thread; });
}

}  // namespace bytecheckpoint::io
