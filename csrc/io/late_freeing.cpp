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

/// A file without a name that is mapped, so that its space is not free.
struct MappedFile {
  void* page = nullptr;  // null: the file is not mapped
  int64_t bytes = 0;
};

/// Files to unmap, and the thread that does.
struct Backlog {
  base::Mutex mutex;
  std::condition_variable freed;
  std::deque<MappedFile> files BCP_GUARDED_BY(mutex);
  int64_t bytes BCP_GUARDED_BY(mutex) = 0;  // of `files`, and of the file that is being unmapped
  bool has_thread BCP_GUARDED_BY(mutex) = false;

  void run() {
    base::MutexLock lock(mutex);
    while (!files.empty()) {
      const MappedFile file = files.front();
      files.pop_front();
      lock.unlock();
      ::munmap(file.page, kMappedBytes);
      lock.lock();
      bytes -= file.bytes;
      freed.notify_all();
    }
    has_thread = false;
  }
};

bool keeps_files_without_a_name(int fd) {
  struct statfs about{};
  if (::fstatfs(fd, &about) != 0) return false;
  const auto type = static_cast<unsigned long>(about.f_type);
  return type == EXT4_SUPER_MAGIC || type == XFS_SUPER_MAGIC || type == BTRFS_SUPER_MAGIC || type == TMPFS_MAGIC ||
         type == F2FS_SUPER_MAGIC;
}

/// Maps a file whose space is worth it. Nothing of this may fail the removal.
MappedFile map_large_file(const std::string& path) {
  MappedFile file;
  const int fd = ::open(path.c_str(), O_RDONLY | O_NOFOLLOW | O_CLOEXEC | O_NONBLOCK);
  if (fd < 0) return file;
  struct stat info{};
  if (::fstat(fd, &info) == 0 && S_ISREG(info.st_mode) && info.st_nlink == 1 && keeps_files_without_a_name(fd)) {
    file.bytes = static_cast<int64_t>(info.st_blocks) * 512;
    void* const page =
        file.bytes < kLeastBytes ? MAP_FAILED : ::mmap(nullptr, kMappedBytes, PROT_NONE, MAP_PRIVATE, fd, 0);
    if (page != MAP_FAILED && ::madvise(page, kMappedBytes, MADV_DONTFORK) == 0) {
      file.page = page;
    } else if (page != MAP_FAILED) {
      ::munmap(page, kMappedBytes);
    }
  }
  ::close(fd);
  return file;
}

}  // namespace

Status remove_and_free_later(const std::string& path) {
  const MappedFile file = map_large_file(path);
  Status removed = remove_file(path);
  if (file.page == nullptr) return removed;
  Backlog& backlog = base::of_process<Backlog>();
  const base::MutexLock lock(backlog.mutex);
  backlog.files.push_back(file);
  backlog.bytes += file.bytes;
  if (backlog.has_thread) return removed;
  try {
    // Nobody waits for this thread at the end of the process, when the system frees what is left.
    base::named_thread("bcp-free", [&backlog] { backlog.run(); }).detach();
    backlog.has_thread = true;
  } catch (const std::system_error&) {  // no thread can be started: frees it here
    backlog.files.pop_back();
    backlog.bytes -= file.bytes;
    ::munmap(file.page, kMappedBytes);
  }
  return removed;
}

int64_t bytes_to_be_freed() {
  Backlog& backlog = base::of_process<Backlog>();
  const base::MutexLock lock(backlog.mutex);
  return backlog.bytes;
}

void wait_until_freed() {
  Backlog& backlog = base::of_process<Backlog>();
  base::MutexLock lock(backlog.mutex);
  backlog.freed.wait(lock, [&] { return backlog.bytes == 0; });
}

}  // namespace bytecheckpoint::io
