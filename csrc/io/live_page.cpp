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

/// Returns the page as it is at first, with counters that say "no phase".
std::string first_image(std::string_view header) {
  std::string page(kLivePageBytes, '\0');
  const base::LiveCounters counters;
  const auto length = static_cast<uint32_t>(std::min(header.size(), kLivePageBytes - kHeaderOffset - sizeof(uint32_t)));
  std::memcpy(page.data(), kLivePageMagic.data(), kLivePageMagic.size());
  std::memcpy(page.data() + kLivePageMagic.size(), &counters, sizeof counters);
  std::memcpy(page.data() + kHeaderOffset, &length, sizeof length);
  std::memcpy(page.data() + kHeaderOffset + sizeof length, header.data(), length);
  return page;
}

}  // namespace

base::Result<std::shared_ptr<base::LiveCounters>> make_live_page(std::string_view header) {
  const std::string name(kLivePageName);
  const auto refused = [&](const char* call) { return base::Status::storage(call, name, "a page", errno); };
  const int fd = ::memfd_create(name.c_str(), MFD_CLOEXEC);
  if (fd < 0) return refused("memfd_create");
  const std::string image = first_image(header);
  void* page = MAP_FAILED;
  if (::write(fd, image.data(), image.size()) == static_cast<ssize_t>(image.size())) {
    page = ::mmap(nullptr, image.size(), PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
  }
  if (page == MAP_FAILED) {
    base::Status failed = refused("mmap");
    ::close(fd);
    return failed;
  }
  auto* const counters = new (static_cast<uint8_t*>(page) + kLivePageMagic.size()) base::LiveCounters();
  return std::shared_ptr<base::LiveCounters>(counters, [page, fd](base::LiveCounters*) {
    ::munmap(page, kLivePageBytes);
    ::close(fd);
  });
}

}  // namespace bytecheckpoint::io
