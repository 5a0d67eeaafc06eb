// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <string>

namespace bytecheckpoint::staging {

/// Returns how many bytes this process can still allocate before processes are killed or swapped out: the least of what
/// the kernel estimates, what the control groups of the process have left, and, if the kernel never overcommits, what
/// it has not promised yet. -1 if none of these is known. Reads some files in /proc and /sys.
///
/// \param root  Directory that holds /proc and /sys; for tests.
int64_t available_memory_bytes(const std::string& root = {});

}  // namespace bytecheckpoint::staging
