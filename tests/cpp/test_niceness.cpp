// SPDX-License-Identifier: Apache-2.0
#include "csrc/base/niceness.h"

#include <doctest/doctest.h>
#include <sys/resource.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <thread>

namespace bytecheckpoint::base {
namespace {

int niceness() {
  return ::getpriority(PRIO_PROCESS, static_cast<id_t>(::syscall(SYS_gettid)));
}

TEST_CASE("niceness: it is added to the calling thread's, and to no other's") {
  const int before = niceness();
  int after = -100, unchanged = -100;
  std::thread([&] {
    add_niceness(0);
    unchanged = niceness();
    add_niceness(3);
    after = niceness();
  }).join();
  CHECK(unchanged == before);
  CHECK(after == std::min(before + 3, 19));
  CHECK(niceness() == before);
}

}  // namespace
}  // namespace bytecheckpoint::base
