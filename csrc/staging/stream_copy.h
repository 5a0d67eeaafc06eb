// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <vector>

namespace bytecheckpoint::staging {

/// Copies `bytes` bytes without going through the caches, which saves reading the lines that are overwritten. Use it
/// for memory that is not read again soon. Any alignment; the ranges must not overlap. Other threads see the bytes
/// after `end_stream_copies`.
/// \param next, next_bytes  What to fetch to the first-level cache meanwhile; of that, at most `bytes` bytes are. So
/// memory is read while it is written, also where the caller sums each piece before it copies it.
void stream_copy(uint8_t* to, const uint8_t* from, int64_t bytes, const uint8_t* next = nullptr,
                 int64_t next_bytes = 0);

/// A way to copy whole lines of 64 bytes to an aligned place. It fetches `next_bytes` bytes at `next`, as above.
struct StreamKernel {
  const char* name;
  void (*copy_lines)(uint8_t* to, const uint8_t* from, int64_t bytes, const uint8_t* next, int64_t next_bytes);
};

/// Returns the kernels that this CPU can run, the fastest first, which `stream_copy` uses. None if it only has memcpy.
std::vector<StreamKernel> stream_kernels();

/// Makes all that this thread has stream-copied visible before anything that it writes later.
void end_stream_copies();

}  // namespace bytecheckpoint::staging
