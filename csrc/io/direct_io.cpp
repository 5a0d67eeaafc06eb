// SPDX-License-Identifier: Apache-2.0
#include "csrc/io/direct_io.h"

#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <map>
#include <mutex>
#include <optional>

#include "csrc/base/per_process.h"
#include "csrc/io/file_system.h"

namespace bytecheckpoint::io {
namespace {

/// Whether `take_refusal_of_direct` has something to tell.
std::atomic<bool> refused{false};

/// Which file systems take direct transfers, by device, as far as this process has found out.
struct DirectDevices {
  std::mutex mutex;
  std::map<dev_t, bool> known;
};

/// Makes a direct transfer of one block at the start of an open file: a read, or if it is new and empty, a write.
/// \returns whether the file system takes them; nothing if that was not to be seen.
std::optional<bool> try_direct(int fd, bool is_new) {
  alignas(kDirectAlignment) char block[kDirectAlignment] = {};
  const ssize_t moved = is_new ? ::pwrite(fd, block, sizeof(block), 0) : ::pread(fd, block, sizeof(block), 0);
  if (moved > 0 && is_new) (void)!::ftruncate(fd, 0);  // whoever made the file sets its size in any case
  if (moved > 0) return true;
  return moved < 0 && errno == EINVAL ? std::optional(false) : std::nullopt;
}

}  // namespace

bool takes_direct(int fd, dev_t device, bool is_new) {
  auto& devices = base::of_process<DirectDevices>();
  {
    const std::lock_guard lock(devices.mutex);
    const auto found = devices.known.find(device);
    if (found != devices.known.end()) return found->second;
  }
  const std::optional<bool> takes = is_in_user_space(fd) ? try_direct(fd, is_new) : true;
  if (!takes.has_value()) return true;
  if (!*takes) note_refusal_of_direct();
  const std::lock_guard lock(devices.mutex);
  devices.known.emplace(device, *takes);
  return *takes;
}

void note_refusal_of_direct() {
  refused = true;
}

bool take_refusal_of_direct() {
  return refused.exchange(false);
}

}  // namespace bytecheckpoint::io
