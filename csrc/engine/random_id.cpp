// SPDX-License-Identifier: Apache-2.0
#include "csrc/engine/random_id.h"

#include <sys/random.h>

#include <atomic>
#include <cerrno>
#include <chrono>

namespace bytecheckpoint::engine {
namespace {

constexpr int64_t kADayMs = int64_t{24} * 3'600'000;

// The latest begin of a save, in milliseconds since 1970, that this process has drawn, or was told.
std::atomic<int64_t> last_ms{0};

/// Returns the milliseconds since 1970, but later ones than `last_ms` if the clock was set back.
///
/// A clock that was a day and more ahead was wrong: readers do not believe its ids, and they must not go on.
int64_t later_ms() {
  const auto since_1970 = std::chrono::system_clock::now().time_since_epoch();
  const int64_t now_ms = std::chrono::duration_cast<std::chrono::milliseconds>(since_1970).count();
  int64_t last = last_ms.load();
  for (;;) {
    const int64_t next = last >= now_ms && last - now_ms < kADayMs ? last + 1 : now_ms;
    if (last_ms.compare_exchange_weak(last, next)) return next;
  }
}

}  // namespace

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
  const int64_t began_ms = later_ms();
  for (int i = 0; i < 6; ++i) id[i] = static_cast<uint8_t>(began_ms >> (40 - 8 * i));
  id[6] = 0x70 | (id[6] & 0x0f);  // version 7
  id[8] = 0x80 | (id[8] & 0x3f);  // the variant of RFC 9562
  return id;
}

void draw_save_ids_after(int64_t began_ms) {
  int64_t last = last_ms.load();
  while (last < began_ms && !last_ms.compare_exchange_weak(last, began_ms)) {
  }
}

}  // namespace bytecheckpoint::engine
