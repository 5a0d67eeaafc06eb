// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>

namespace bytecheckpoint::staging {

/// Copies `bytes` bytes without going through the caches, which saves reading the lines that are overwritten. Use it
/// for memory that is not read again soon. Any alignment; the ranges must not overlap. Other threads see the bytes
/// after `end_stream_copies`.
void stream_copy(uint8_t* to, const uint8_t* from, int64_t bytes);

/// Makes all that this thread has stream-copied visible before anything that it writes later.
void end_stream_copies();

}  // namespace bytecheckpoint::staging
