// SPDX-License-Identifier: Apache-2.0
#include "csrc/engine/random_id.h"

#include <sys/random.h>

#include <cerrno>

namespace bytecheckpoint::engine {

base::Result<base::Id> draw_id() {
  base::Id id;
  // The kernel returns up to 256 bytes whole or not at all.
  while (::getrandom(id.data(), id.size(), 0) != static_cast<ssize_t>(id.size())) {
    if (errno != EINTR) return base::Status::storage("getrandom", "kernel", "16 bytes", errno);
  }
  return id;
}

}  // namespace bytecheckpoint::engine
