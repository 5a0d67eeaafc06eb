// SPDX-License-Identifier: Apache-2.0
#include "csrc/io/memory_file.h"

#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <thread>
#include <utility>

#include "csrc/base/bytes.h"
#include "csrc/base/named_thread.h"

namespace bytecheckpoint::io {

using base::Status;

namespace {

/// MADV_POPULATE_WRITE, which is not in the headers of every system. Known since Linux 5.14.
constexpr int kPopulateWrite = 23;
/// One call for so many bytes, of which a few threads make pages present: to find them costs as much as to fill them.
constexpr int64_t kPopulateBytes = 32 << 20;
constexpr unsigned kMostThreads = 8;
/// Memory that is mapped behind what is reserved, for what stands between the records of a file.
constexpr int64_t kBetweenBytes = 64 << 10;
constexpr int64_t kRecordBytesToBetween = 4096;

/// Makes all pages of a mapping present. \returns 0, or the errno.
int populate(uint8_t* first, int64_t bytes) {
  std::atomic<int64_t> next{0};
  std::atomic<int> failed{0};
  const auto chunks = static_cast<size_t>((bytes + kPopulateBytes - 1) / kPopulateBytes);
  const size_t num_threads = std::min<size_t>({chunks, std::thread::hardware_concurrency(), kMostThreads});
  base::work_together("bcp-populate", num_threads, [&] {
    for (int64_t at = next.fetch_add(kPopulateBytes); at < bytes && failed == 0; at = next.fetch_add(kPopulateBytes)) {
      const auto size = static_cast<size_t>(std::min(kPopulateBytes, bytes - at));
      int outcome = 0;
      do {
        outcome = ::madvise(first + at, size, kPopulateWrite);
      } while (outcome != 0 && (errno == EINTR || errno == EAGAIN));
      if (outcome != 0) failed = errno;
    }
  });
  return failed;
}

}  // namespace

void UnmapMemory::operator()(uint8_t* first) const {
  if (::getpid() == owner) ::munmap(first, static_cast<size_t>(bytes));
}

base::Result<MemoryFile> MemoryFile::open(const StorePlace& place, const std::string& path) {
  MemoryFile file;
  BCP_ASSIGN_OR_RETURN(const int fd, place.store->in_memory()->descriptor(place.name));
  file.memory_ = DiskFile(Descriptor(fd, path, /*direct=*/false));
  file.place_ = place;
  return file;
}

base::Result<MemoryFile> MemoryFile::create(const StorePlace& place, const std::string& path) {
  BCP_ASSIGN_OR_RETURN(int fd, place.store->in_memory()->spare(place.name));
  const bool is_spare = fd >= 0;
  if (!is_spare) fd = ::memfd_create("bytecheckpoint", MFD_CLOEXEC);
  if (fd < 0) return Status::storage("memfd_create", path, "", errno);
  MemoryFile file;
  file.memory_ = DiskFile(Descriptor(fd, path, /*direct=*/false));
  file.place_ = place;
  file.is_new_ = true;
  if (is_spare) {
    BCP_ASSIGN_OR_RETURN(file.spare_bytes_, file.memory_.size());
  }
  return file;
}

Status MemoryFile::reserve(int64_t bytes) {
  BCP_RETURN_IF_ERROR(place_.store->in_memory()->reserve(place_.name, bytes, spare_bytes_));
  if (bytes <= 0) return Status::ok();
  const int64_t with_between = bytes + bytes / kRecordBytesToBetween + kBetweenBytes;
  return map(with_between);
}

Status MemoryFile::map(int64_t bytes) {
  const std::string detail = base::text(bytes, " bytes");
  const auto refused = [&](const char* call, int error) { return Status::storage(call, path(), detail, error); };
  if (bytes > spare_bytes_) BCP_RETURN_IF_ERROR(truncate(bytes));
  void* const first = ::mmap(nullptr, static_cast<size_t>(bytes), PROT_READ | PROT_WRITE, MAP_SHARED, memory_.fd(), 0);
  if (first == MAP_FAILED) return refused("mmap", errno);
  mapped_ = {static_cast<uint8_t*>(first), UnmapMemory{bytes, ::getpid()}};
  // Advice: without it there are more pages, or a child that is forked meanwhile has them too.
  (void)::madvise(first, static_cast<size_t>(bytes), MADV_HUGEPAGE);
  (void)::madvise(first, static_cast<size_t>(bytes), MADV_DONTFORK);
  const int failed = populate(mapped_.get(), bytes);
  if (failed == EINVAL) return memory_.reserve(bytes);  // of a kernel that does not know it
  return failed == 0 ? Status::ok() : refused("madvise", failed == EFAULT ? ENOMEM : failed);
}

Status MemoryFile::truncate(int64_t bytes) {
  if (::ftruncate(memory_.fd(), bytes) == 0) return Status::ok();
  return Status::storage("ftruncate", path(), base::text(bytes, " bytes"), errno);
}

Status MemoryFile::finish() {
  if (!std::exchange(is_new_, false)) return Status::ok();
  mapped_.reset();
  return place_.store->in_memory()->keep(place_.name, memory_.fd());
}

Status MemoryFile::close() {
  const Status finished = finish();
  const Status closed = memory_.close();
  return finished.is_ok() ? closed : finished;
}

}  // namespace bytecheckpoint::io
