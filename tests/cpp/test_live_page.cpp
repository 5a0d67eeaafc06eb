// SPDX-License-Identifier: Apache-2.0
#include "csrc/io/live_page.h"

#include <dirent.h>
#include <fcntl.h>
#include <unistd.h>

#include <cstring>

#include "tests/cpp/expect.h"

namespace bytecheckpoint::io {
namespace {

/// The pages of this process, as another process of this user would find them.
std::vector<std::string> pages() {
  std::vector<std::string> found;
  DIR* const folder = ::opendir("/proc/self/fd");
  REQUIRE(folder != nullptr);
  while (const dirent* entry = ::readdir(folder)) {
    const std::string path = std::string("/proc/self/fd/") + entry->d_name;
    char target[256] = {};
    if (::readlink(path.c_str(), target, sizeof target - 1) <= 0) continue;
    if (std::string(target).find(kLivePageName) == std::string::npos) continue;
    const int fd = ::open(path.c_str(), O_RDONLY | O_CLOEXEC);
    REQUIRE(fd >= 0);
    std::string bytes(4096, '\0');
    CHECK(::pread(fd, bytes.data(), bytes.size(), 0) == 4096);
    ::close(fd);
    found.push_back(bytes);
  }
  ::closedir(folder);
  return found;
}

TEST_CASE("live page: others see the counters and the header while the counters exist") {
  CHECK(pages().empty());
  {
    const std::shared_ptr<base::LiveCounters> counters = test::value_of(make_live_page("{\"path\": \"/a\"}"));
    base::Trace trace(base::TraceOptions{}, counters);
    trace.enter(base::Phase::kWrite);
    trace.live().bytes_done.fetch_add(77);
    const std::vector<std::string> seen = pages();
    REQUIRE(seen.size() == 1);
    CHECK(seen[0].substr(0, 8) == kLivePageMagic);
    int64_t numbers[4];
    std::memcpy(numbers, seen[0].data() + 8, sizeof numbers);
    CHECK(numbers[0] == static_cast<int64_t>(base::Phase::kWrite));
    CHECK(numbers[1] > 0);
    CHECK(numbers[2] == 77);
    uint32_t length = 0;
    std::memcpy(&length, seen[0].data() + 40, sizeof length);
    CHECK(seen[0].substr(44, length) == "{\"path\": \"/a\"}");
  }
  CHECK(pages().empty());
}

TEST_CASE("live page: a header that is too long is cut") {
  const auto counters = test::value_of(make_live_page(std::string(10'000, 'x')));
  const std::string page = pages().at(0);
  CHECK(page.substr(44) == std::string(4096 - 44, 'x'));
}

}  // namespace
}  // namespace bytecheckpoint::io
