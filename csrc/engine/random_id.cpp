// SPDX-License-Identifier: Apache-2.0
#include "csrc/engine/random_id.h"

#include <sys/random.h>

#include <cerrno>
#include <chrono>

namespace bytecheckpoint::engine {

base::Result<base::Id> draw_id() {
  base::Id id;
  // The kernel returns up to 256 bytes whole or not at all.
  while (::getrandom(id.data(), id.size(), 0) != static_cast<ssize_t>(id.size())) {
    if (errno != EINTR) return base::Status::storage("getrandom", "kernel", "16 bytes", errno);
  }
  return id;
}

base::Result<base::Id> draw_save_id() {
  BCP_ASSIGN_OR_RETURN(base::Id id, draw_id());
  const auto since_1970 = std::chrono::system_clock::now().time_since_epoch();
  const auto now_ms = std::chrono::duration_cast<std::chrono::milliseconds>(since_1970).count();
  for (int i = 0; i < 6; ++i) id[i] = static_cast<uint8_t>(now_ms >> (40 - 8 * i));
  id[6] = 0x70 | (id[6] & 0x0f);  // version 7
  id[8] = 0x80 | (id[8] & 0x3f);  // the variant of RFC 9562
  return id;
}

}  // namespace bytecheckpoint::engine
