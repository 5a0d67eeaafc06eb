// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <mutex>

// Clang's thread-safety analysis checks these annotations. Other compilers ignore them, readers should not.
#if defined(__clang__)
#define BCP_GUARDED_BY(mutex) __attribute__((guarded_by(mutex)))
#define BCP_REQUIRES(mutex) __attribute__((exclusive_locks_required(mutex)))
#else
#define BCP_GUARDED_BY(mutex)
#define BCP_REQUIRES(mutex)
#endif

namespace bytecheckpoint::base {

using Mutex = std::mutex;
using MutexLock = std::unique_lock<std::mutex>;

}  // namespace bytecheckpoint::base
