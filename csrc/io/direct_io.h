// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <sys/types.h>

#include <cstdint>

namespace bytecheckpoint::io {

/// The alignment of buffers, offsets and lengths that is enough for O_DIRECT on every file system we know.
inline constexpr int64_t kDirectAlignment = 4096;

/// Whether memory, size and offset of a transfer are multiples of `kDirectAlignment`.
inline bool is_aligned(const void* bytes, int64_t size, int64_t offset) {
  return (reinterpret_cast<uintptr_t>(bytes) % kDirectAlignment | static_cast<uint64_t>(size) % kDirectAlignment |
          static_cast<uint64_t>(offset) % kDirectAlignment) == 0;
}

/// Whether direct transfers of a file that was opened for them can go on. Servers in user space answer an open without
/// a look at the flag, so one transfer is made in the first file of such a device.
/// \param is_new  The file is empty, and whoever made it writes its first block later.
bool takes_direct(int fd, dev_t device, bool is_new);

/// Notes that a file system has refused a direct transfer, though it had opened the file for them.
void note_refusal_of_direct();
/// Whether that was noted in this process since the last call. Those bytes went through the page cache.
bool take_refusal_of_direct();

}  // namespace bytecheckpoint::io
