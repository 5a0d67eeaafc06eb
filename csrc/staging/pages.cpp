// SPDX-License-Identifier: Apache-2.0
#include "csrc/staging/pages.h"

#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <string>

#include "csrc/base/bytes.h"

namespace bytecheckpoint::staging {
namespace {

constexpr int kPopulateWrite = 23;  // MADV_POPULATE_WRITE, which older headers do not have
/// Touched by one call: some milliseconds, after which the thread looks whether it is to stop.
constexpr int64_t kPopulateBytes = 8 << 20;

}  // namespace

base::Result<std::unique_ptr<Pages>> Pages::map(int64_t bytes, std::string_view what) {
  std::unique_ptr<Pages> pages(new Pages());
  pages->bytes_ = bytes;
  pages->mapping_bytes_ = static_cast<size_t>(bytes + kHugePageBytes);
  void* mapping = ::mmap(nullptr, pages->mapping_bytes_, PROT_READ | PROT_WRITE,
                         MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (mapping == MAP_FAILED) {
    return base::Status::storage("mmap", std::string(what), base::text(pages->mapping_bytes_, " bytes"), errno);
  }
  pages->mapping_ = mapping;
  pages->first_ = reinterpret_cast<uint8_t*>(base::align_up(reinterpret_cast<int64_t>(mapping), kHugePageBytes));
  // Advice: without huge pages everything works, at about half the speed.
  (void)::madvise(pages->first_, static_cast<size_t>(bytes), MADV_HUGEPAGE);
  return pages;
}

Pages::Pages() : owner_(::getpid()) {}

void Pages::populate(int64_t bytes) {
  const int64_t begin = populated_bytes_;
  const int64_t end = std::min(bytes, bytes_);
  if (end <= begin || ::getpid() != owner_) return;
  stop_populating();
  stop_ = false;
  populated_bytes_ = end;
  populating_ = std::thread([this, begin, end] {
    for (int64_t at = begin; at < end && !stop_; at += kPopulateBytes) {
      // Advice: where the kernel does not know it, pages are touched when they are used.
      (void)::madvise(first_ + at, static_cast<size_t>(std::min(kPopulateBytes, end - at)), kPopulateWrite);
    }
  });
}

void Pages::stop_populating() {
  if (!populating_.joinable()) return;
  if (::getpid() != owner_) {
    // A forked child has no such thread, and another may have its handle: it can be neither joined nor detached.
    new std::thread(std::move(populating_));
    return;
  }
  stop_ = true;
  populating_.join();
}

Pages::~Pages() {
  stop_populating();
  if (mapping_ != nullptr) ::munmap(mapping_, mapping_bytes_);
}

}  // namespace bytecheckpoint::staging
