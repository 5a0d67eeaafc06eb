// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <chrono>
#include <string>
#include <string_view>
#include <vector>

#include "csrc/base/mutex.h"
#include "csrc/base/status.h"

namespace bytecheckpoint::io {

/// Notes since when each thread of a pipeline has been in a call to storage: what `IoDeadline` is for single calls.
/// Whoever waits for the pipeline looks at `status` meanwhile. Thread-safe.
class PendingCalls {
 public:
  /// The interval at which a thread that waits for the pipeline looks at `status`.
  static constexpr std::chrono::milliseconds kLook{100};

  /// \param timeout_s  How long one call may take; 0: for ever.
  PendingCalls(int num_threads, double timeout_s)
      : timeout_s_(timeout_s), calls_(static_cast<size_t>(timeout_s > 0 ? num_threads : 0)) {}

  bool is_bounded() const { return timeout_s_ > 0; }
  /// Makes room for the calls of more threads.
  void add_threads(int num_threads) {
    base::MutexLock lock(mutex_);
    if (is_bounded()) calls_.resize(calls_.size() + static_cast<size_t>(num_threads));
  }
  /// Notes that a call begins. \param operation  A string literal.
  void begin(int thread, std::string_view operation, const std::string& path) {
    if (!is_bounded()) return;
    base::MutexLock lock(mutex_);
    calls_[static_cast<size_t>(thread)] = {true, std::chrono::steady_clock::now(), operation, path};
  }
  /// Notes that the call of this thread has ended.
  void end(int thread) {
    if (!is_bounded()) return;
    base::MutexLock lock(mutex_);
    calls_[static_cast<size_t>(thread)].is_pending = false;
  }
  /// \returns kStorage with ETIMEDOUT while a call is taking too long.
  base::Status status();

 private:
  struct Call {
    bool is_pending = false;
    std::chrono::steady_clock::time_point since;
    std::string_view operation;
    std::string path;
  };

  const double timeout_s_;
  base::Mutex mutex_;
  std::vector<Call> calls_ BCP_GUARDED_BY(mutex_);
};

}  // namespace bytecheckpoint::io
