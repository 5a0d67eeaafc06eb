// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <chrono>
#include <condition_variable>
#include <functional>
#include <thread>
#include <vector>

#include "csrc/base/bounded_queue.h"
#include "csrc/base/mutex.h"
#include "csrc/base/status.h"
#include "csrc/io/file.h"
#include "csrc/io/pending_calls.h"

namespace bytecheckpoint::io {

/// Bytes of a slot on their way to a file. The file and the bytes outlive the request.
struct WriteRequest {
  File* file = nullptr;
  const uint8_t* bytes = nullptr;
  int64_t size = 0;
  int64_t offset = 0;
  int slot = -1;
};

struct WriterOptions {
  int num_threads = 1;
  size_t capacity = 1;      // requests that wait; one more blocks its submitter
  int niceness = 0;         // added to that of the threads
  int64_t bytes_per_s = 0;  // of all threads together; 0: as fast as the storage takes them
  double io_timeout_s = 0;  // for which one write may take; 0: for ever
};

/// Threads that write slots while their owner fills others.
///
/// After the first failure nothing more is written, but slots keep being released, so that the filling side can never
/// wait for ever. A write that takes too long is a failure, too, whose slot is not released before it ends: who waits
/// for slots looks at `status` meanwhile.
class Writer {
 public:
  /// \param released  Called from a writer thread with the slot of each request that is done; must not block.
  Writer(const WriterOptions& options, std::function<void(int)> released);
  /// Waits for what was submitted, also for a write that takes too long.
  ~Writer();

  void submit(WriteRequest request);
  /// Bytes that have been written so far. Any thread.
  int64_t bytes_written();
  /// Nothing more is written, as after a failure: kCancelled, unless something failed before. Any thread.
  void cancel();
  /// First failure so far.
  base::Status status();
  /// Waits until all that was submitted is written, or a write takes too long. \returns the first failure.
  base::Status drain();
  /// The same, and ends the threads: nothing more may be submitted.
  base::Status finish();
  /// May a write take too long?
  bool is_bounded() const { return pending_.is_bounded(); }

 private:
  /// Ends all threads, and waits for them.
  void stop();
  void run(int thread);
  base::Status wait_until_zero(const int64_t& count);
  void fail(base::Status failure) BCP_REQUIRES(mutex_);
  /// Until so many bytes may be written, or nothing more is to be.
  void wait_for_turn(int64_t bytes);

  base::BoundedQueue<WriteRequest> queue_;
  const std::function<void(int)> released_;
  const int64_t bytes_per_s_;
  PendingCalls pending_;
  base::Mutex mutex_;
  int64_t running_ BCP_GUARDED_BY(mutex_);        // threads
  int64_t unwritten_ BCP_GUARDED_BY(mutex_) = 0;  // requests
  base::Status first_failure_ BCP_GUARDED_BY(mutex_);
  int64_t bytes_written_ BCP_GUARDED_BY(mutex_) = 0;
  std::chrono::steady_clock::time_point next_turn_ BCP_GUARDED_BY(mutex_);
  std::condition_variable failed_, ended_;
  std::vector<std::thread> threads_;
};

}  // namespace bytecheckpoint::io
