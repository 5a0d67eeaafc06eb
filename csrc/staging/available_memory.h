// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>

namespace bytecheckpoint::staging {

/// Bytes that this process can still take without others being killed or swapped out for it: what the kernel estimates,
/// and what the control group of the process leaves. -1 where neither is known.
int64_t available_memory_bytes();

}  // namespace bytecheckpoint::staging
