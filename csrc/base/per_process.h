// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <pthread.h>

#include <atomic>
#include <memory>

namespace bytecheckpoint::base {

/// Returns the one `T` of this process, which the first call makes.
///
/// A forked child gets a new `T`: a thread of the parent may have held a mutex in the parent's `T`, and that thread
/// does not exist in the child to release it. The object is never freed, because threads may use it while the process
/// ends. Thread-safe.
template <typename T>
T& of_process() {
  static std::atomic<T*> current{nullptr};  // an atomic, which a handler of fork may set
  static const int kRegistered =
      ::pthread_atfork(nullptr, nullptr, [] { current.store(nullptr, std::memory_order_relaxed); });
  static_cast<void>(kRegistered);
  T* found = current.load(std::memory_order_acquire);
  if (found != nullptr) return *found;
  auto made = std::make_unique<T>();
  return current.compare_exchange_strong(found, made.get(), std::memory_order_acq_rel) ? *made.release() : *found;
}

}  // namespace bytecheckpoint::base
