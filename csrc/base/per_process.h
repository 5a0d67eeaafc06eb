// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <pthread.h>

#include <atomic>
#include <memory>

namespace bytecheckpoint::base {

/// One `T` of each process. A forked child begins with a new one: a thread of the parent may have held a mutex of the
/// parent's, and is not there to give it back. Never freed: threads may look at it while the process ends.
template <typename T>
T& of_process() {
  static std::atomic<T*> current{nullptr};  // which a handler of fork may set
  static const int kRegistered =
      ::pthread_atfork(nullptr, nullptr, [] { current.store(nullptr, std::memory_order_relaxed); });
  static_cast<void>(kRegistered);
  T* found = current.load(std::memory_order_acquire);
  if (found != nullptr) return *found;
  auto made = std::make_unique<T>();
  return current.compare_exchange_strong(found, made.get(), std::memory_order_acq_rel) ? *made.release() : *found;
}

}  // namespace bytecheckpoint::base
