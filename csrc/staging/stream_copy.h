// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>

namespace bytecheckpoint::staging {

/// Copies `bytes` bytes past the caches, which saves reading the lines that are overwritten: for what is not looked at
/// again soon. Any alignment; the ranges must not overlap. Other threads see the bytes after `end_stream_copies`.
void stream_copy(uint8_t* to, const uint8_t* from, int64_t bytes);

/// Orders what this thread has stream-copied before all it does later.
void end_stream_copies();

}  // namespace bytecheckpoint::staging
