// SPDX-License-Identifier: Apache-2.0
#include "csrc/base/niceness.h"

#include <sys/resource.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <cerrno>

namespace bytecheckpoint::base {

void add_niceness(int steps) {
  if (steps == 0) return;
  // On Linux each thread has its own niceness, although POSIX says otherwise.
  const auto thread = static_cast<id_t>(::syscall(SYS_gettid));
  errno = 0;
  const int now = ::getpriority(PRIO_PROCESS, thread);
  if (errno == 0) (void)::setpriority(PRIO_PROCESS, thread, now + steps);
}

}  // namespace bytecheckpoint::base
