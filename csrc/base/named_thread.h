// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <pthread.h>

#include <cstddef>
#include <system_error>
#include <thread>
#include <utility>
#include <vector>

namespace bytecheckpoint::base {

/// Longest name that the kernel accepts for a thread, without the ending NUL.
inline constexpr size_t kMaxThreadName = 15;

/// Starts a thread that does `work` under the name `bcp-...`. The name shows it in /proc and to debuggers, and lets
/// tests find threads that were left behind. All our threads are started here.
///
/// \param name  A string literal: the thread reads it after this function has returned.
/// Throws std::system_error if the system has no thread to give.
template <size_t N, class Work>
std::thread named_thread(const char (&name)[N], Work work) {
  static_assert(N <= kMaxThreadName + 1);
  return std::thread([&name, work = std::move(work)]() mutable {  // the name is a literal
    (void)::pthread_setname_np(::pthread_self(), name);
    work();
  });
}

/// Calls `work` in `num_threads` threads, of which the calling thread is the first, and returns when all calls have
/// returned.
///
/// If the system has fewer threads, fewer calls are made, but always at least one. So each call must take the next
/// piece of what is left until nothing is left. `work` must not throw.
template <size_t N, class Work>
void work_together(const char (&name)[N], size_t num_threads, const Work& work) {
  std::vector<std::thread> others;
  others.reserve(num_threads);
  try {
    while (others.size() + 1 < num_threads) others.push_back(named_thread(name, [&work] { work(); }));
  } catch (const std::system_error&) {
    // The threads that were started do all of the work.
  }
  work();
  for (std::thread& other : others) other.join();
}

}  // namespace bytecheckpoint::base
