// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <pthread.h>

#include <cstddef>
#include <thread>
#include <utility>

namespace bytecheckpoint::base {

/// Longer ones the kernel refuses.
inline constexpr size_t kMaxThreadName = 15;

/// A thread that does `work` under the name `bcp-...`, by which it is known from outside: in /proc, to debuggers, and
/// to tests that look for threads that were left behind. All our threads begin here.
///
/// Throws std::system_error if there is none to be had.
template <size_t N, class Work>
std::thread named_thread(const char (&name)[N], Work work) {
  static_assert(N <= kMaxThreadName + 1);
  return std::thread([&name, work = std::move(work)]() mutable {  // the name is a literal
    (void)::pthread_setname_np(::pthread_self(), name);
    work();
  });
}

}  // namespace bytecheckpoint::base
