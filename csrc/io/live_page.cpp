// SPDX-License-Identifier: Apache-2.0
#include "csrc/io/live_page.h"

#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <new>
#include <string>

#include "csrc/base/bytes.h"

namespace bytecheckpoint::io {
namespace {

constexpr size_t kLivePageBytes = 4096;
constexpr size_t kHeaderOffset = kLivePageMagic.size() + sizeof(base::LiveCounters);
static_assert(sizeof(base::LiveCounters) == 4 * sizeof(int64_t), "readers know this layout");
static_assert(kLivePageMagic.size() % alignof(base::LiveCounters) == 0, "the counters are aligned");

}  // namespace

base::Result<std::shared_ptr<base::LiveCounters>> make_live_page(std::string_view header) {
  const std::string name(kLivePageName);
  const auto refused = [&](const char* call) { return base::Status::storage(call, name, "a page", errno); };
  const int fd = ::memfd_create(name.c_str(), MFD_CLOEXEC);
  if (fd < 0) return refused("memfd_create");
  void* page = MAP_FAILED;
  if (::ftruncate(fd, kLivePageBytes) == 0) {
    page = ::mmap(nullptr, kLivePageBytes, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
  }
  if (page == MAP_FAILED) {
    base::Status failed = refused("mmap");
    ::close(fd);
    return failed;
  }
  auto* const bytes = static_cast<uint8_t*>(page);
  auto* const counters = new (bytes + kLivePageMagic.size()) base::LiveCounters();
  const auto length = static_cast<uint32_t>(std::min(header.size(), kLivePageBytes - kHeaderOffset - sizeof(uint32_t)));
  std::memcpy(bytes + kHeaderOffset, &length, sizeof length);
  std::memcpy(bytes + kHeaderOffset + sizeof length, header.data(), length);
  std::memcpy(bytes, kLivePageMagic.data(), kLivePageMagic.size());  // the page is valid from now on
  return std::shared_ptr<base::LiveCounters>(counters, [page, fd](base::LiveCounters*) {
    ::munmap(page, kLivePageBytes);
    ::close(fd);
  });
}

}  // namespace bytecheckpoint::io
