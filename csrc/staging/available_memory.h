// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <string>

namespace bytecheckpoint::staging {

/// Bytes that this process can still take without others being killed or swapped out for it: what the kernel estimates,
/// what the control group of the process leaves, and, where the kernel never overcommits, what it has not promised yet.
/// -1 where none is known.
///
/// \param root  That /proc and /sys are in, for tests.
int64_t available_memory_bytes(const std::string& root = {});

}  // namespace bytecheckpoint::staging
