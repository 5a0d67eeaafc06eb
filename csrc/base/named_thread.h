// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <pthread.h>

#include <cstddef>
#include <system_error>
#include <thread>
#include <utility>
#include <vector>

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

/// Does `work` in `num_threads`, of which this one is the first, or in as many as there are to be had, until all are
/// done. So each takes the next of what is left, and must not throw.
template <size_t N, class Work>
void work_together(const char (&name)[N], size_t num_threads, const Work& work) {
  std::vector<std::thread> others;
  others.reserve(num_threads);
  try {
    while (others.size() + 1 < num_threads) others.push_back(named_thread(name, [&work] { work(); }));
  } catch (const std::system_error&) {
    // Those that there are take all of it.
  }
  work();
  for (std::thread& other : others) other.join();
}

}  // namespace bytecheckpoint::base
