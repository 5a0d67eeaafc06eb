// SPDX-License-Identifier: Apache-2.0
#include "csrc/staging/pages.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <string>

#include "csrc/base/bytes.h"
#include "csrc/base/named_thread.h"

namespace bytecheckpoint::staging {
namespace {

constexpr int kPopulateWrite = 23;  // MADV_POPULATE_WRITE, which older headers do not have
/// Bytes that one call touches. That takes some milliseconds; then the thread looks whether it must stop.
constexpr int64_t kPopulateBytes = 8 << 20;

}  // namespace

base::Result<std::unique_ptr<Pages>> Pages::map(int64_t bytes, std::string_view what, InFork in_fork) {
  std::unique_ptr<Pages> pages(new Pages(bytes));
  BCP_RETURN_IF_ERROR(pages->map_at_huge_page(what, in_fork));
  return pages;
}

base::Result<std::unique_ptr<Pages>> Pages::map_shareable(int64_t bytes, std::string_view what) {
  std::unique_ptr<Pages> pages(new Pages(bytes));
  // A memfd has no name, and so not the limit that /dev/shm has in containers.
  pages->fd_ = ::memfd_create("bytecheckpoint", MFD_CLOEXEC);
  if (pages->fd_ < 0) return base::Status::storage("memfd_create", std::string(what), "", errno);
  if (::ftruncate(pages->fd_, bytes) != 0) {
    return base::Status::storage("ftruncate", std::string(what), base::text(bytes, " bytes"), errno);
  }
  BCP_RETURN_IF_ERROR(pages->map_at_huge_page(what, InFork::kAbsent));
  return pages;
}

base::Result<std::unique_ptr<Pages>> Pages::map_shared(int fd, int64_t bytes, std::string_view what, Access access) {
  struct ::stat status{};
  if (::fstat(fd, &status) != 0) return base::Status::storage("fstat", std::string(what), "", errno);
  if (bytes < 0 || status.st_size < bytes) {
    return base::Status::make(base::Code::kInvalidArgument,
                              base::text(what, ": needs ", bytes, " bytes, but the memory has ", status.st_size));
  }
  std::unique_ptr<Pages> pages(new Pages(bytes));
  pages->fd_ = ::fcntl(fd, F_DUPFD_CLOEXEC, 0);
  if (pages->fd_ < 0) return base::Status::storage("fcntl", std::string(what), "F_DUPFD_CLOEXEC", errno);
  BCP_RETURN_IF_ERROR(pages->map_at_huge_page(what, InFork::kAbsent, access));
  return pages;
}

base::Status Pages::map_at_huge_page(std::string_view what, InFork in_fork, Access access) {
  const auto refused = [&] {
    return base::Status::storage("mmap", std::string(what), base::text(mapping_bytes_, " bytes"), errno);
  };
  mapping_bytes_ = static_cast<size_t>(base::align_up(bytes_, kHugePageBytes) + kHugePageBytes);
  void* mapping =
      ::mmap(nullptr, mapping_bytes_, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (mapping == MAP_FAILED) return refused();
  mapping_ = mapping;
  first_ = reinterpret_cast<uint8_t*>(base::align_up(reinterpret_cast<int64_t>(mapping), kHugePageBytes));
  const auto bytes = static_cast<size_t>(bytes_);
  const int protection = access == Access::kRead ? PROT_READ : PROT_READ | PROT_WRITE;
  if (fd_ >= 0 && bytes != 0 && ::mmap(first_, bytes, protection, MAP_SHARED | MAP_FIXED, fd_, 0) == MAP_FAILED) {
    return refused();
  }
  // Only advice: without huge pages everything works, at about half the speed.
  (void)::madvise(first_, bytes, MADV_HUGEPAGE);
  return in_fork == InFork::kAbsent ? leave_out_of_forks() : base::Status::ok();
}

base::Status Pages::leave_out_of_forks() {
  if (in_fork_ == InFork::kAbsent) return base::Status::ok();
  in_fork_ = InFork::kAbsent;  // first: a child that is forked in between only leaks the memory
  if (::madvise(mapping_, mapping_bytes_, MADV_DONTFORK) != 0) {
    in_fork_ = InFork::kCopied;
    return base::Status::storage("madvise", "", base::text(mapping_bytes_, " bytes, MADV_DONTFORK"), errno);
  }
  return base::Status::ok();
}

bool Pages::is_here() const {
  return in_fork_ == InFork::kCopied || ::getpid() == owner_;
}

Pages::Pages(int64_t bytes) : bytes_(bytes), owner_(::getpid()) {}

void Pages::populate(int64_t bytes) {
  const int64_t begin = populated_bytes_;
  const int64_t end = std::min(bytes, bytes_);
  if (end <= begin || ::getpid() != owner_) return;
  stop_populating();
  stop_ = false;
  populated_bytes_ = end;
  populating_ = base::named_thread("bcp-populate", [this, begin, end] {
    for (int64_t at = begin; at < end && !stop_; at += kPopulateBytes) {
      // Only advice: a kernel that does not know it touches pages when they are used.
      (void)::madvise(first_ + at, static_cast<size_t>(std::min(kPopulateBytes, end - at)), kPopulateWrite);
    }
  });
}

void Pages::stop_populating() {
  if (!populating_.joinable()) return;
  if (::getpid() != owner_) {
    // A forked child has no such thread, and another thread may have got its handle, so it can be neither joined nor
    // detached. Leaks the handle.
    new std::thread(std::move(populating_));
    return;
  }
  stop_ = true;
  populating_.join();
}

Pages::~Pages() {
  stop_populating();
  held_.reset();
  if (fd_ >= 0) ::close(fd_);
  // If the memory is absent in this child, something else may be at its address.
  if (mapping_ != nullptr && is_here()) ::munmap(mapping_, mapping_bytes_);
}

}  // namespace bytecheckpoint::staging
