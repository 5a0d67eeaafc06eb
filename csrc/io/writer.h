// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <functional>
#include <thread>
#include <vector>

#include "csrc/base/bounded_queue.h"
#include "csrc/base/mutex.h"
#include "csrc/base/status.h"
#include "csrc/io/file.h"

namespace bytecheckpoint::io {

/// Bytes of a slot on their way to a file. The file and the bytes outlive the request.
struct WriteRequest {
  File* file = nullptr;
  const uint8_t* bytes = nullptr;
  int64_t size = 0;
  int64_t offset = 0;
  int slot = -1;
};

/// Threads that write slots while their owner fills others.
///
/// After the first failure nothing more is written, but slots keep being released, so that the filling side can never
/// wait for ever.
class Writer {
 public:
  /// \param released  Called from a writer thread with the slot of each request that is done; must not block.
  /// \param niceness  Added to that of the threads.
  Writer(int num_threads, size_t capacity, std::function<void(int)> released, int niceness = 0);
  /// Waits for what was submitted.
  ~Writer();

  void submit(WriteRequest request);
  /// Bytes that have been written so far. Any thread.
  int64_t bytes_written();
  /// Nothing more is written, as after a failure: kCancelled, unless something failed before. Any thread.
  void cancel();
  /// First failure so far.
  base::Status status();
  /// Ends the threads when all that was submitted is written. \returns the first failure.
  base::Status finish();

 private:
  void run();

  base::BoundedQueue<WriteRequest> queue_;
  const std::function<void(int)> released_;
  base::Mutex mutex_;
  base::Status first_failure_ BCP_GUARDED_BY(mutex_);
  int64_t bytes_written_ BCP_GUARDED_BY(mutex_) = 0;
  std::vector<std::thread> threads_;
};

}  // namespace bytecheckpoint::io
