// SPDX-License-Identifier: Apache-2.0
#include <doctest/doctest.h>
#include <sys/wait.h>
#include <unistd.h>

#include "csrc/base/mutex.h"
#include "csrc/base/per_process.h"

namespace bytecheckpoint::base {
namespace {

struct Counted {
  Mutex mutex;
  int count = 0;
};

TEST_CASE("a process has one of a type, and a forked child another one") {
  Counted& mine = of_process<Counted>();
  mine.count = 7;
  CHECK(&of_process<Counted>() == &mine);

  const MutexLock lock(mine.mutex);
  const pid_t child = ::fork();
  REQUIRE(child >= 0);
  if (child == 0) {
    Counted& fresh = of_process<Counted>();
    const bool is_free = fresh.mutex.try_lock();
    ::_exit(is_free && fresh.count == 0 && &of_process<Counted>() == &fresh ? 0 : 1);
  }
  int status = -1;
  REQUIRE(::waitpid(child, &status, 0) == child);
  CHECK(status == 0);
  CHECK(of_process<Counted>().count == 7);
}

}  // namespace
}  // namespace bytecheckpoint::base
