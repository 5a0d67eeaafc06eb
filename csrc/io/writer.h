// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <chrono>
#include <condition_variable>
#include <functional>
#include <string_view>
#include <thread>
#include <vector>

#include "csrc/base/bounded_queue.h"
#include "csrc/base/mutex.h"
#include "csrc/base/status.h"
#include "csrc/base/trace.h"
#include "csrc/io/file.h"
#include "csrc/io/pending_calls.h"

namespace bytecheckpoint::io {

/// Bytes to write to a file: those of a slot, and others between them. The file and the bytes must outlive the request.
/// Without a slot: a file to sync.
struct WriteRequest {
  File* file = nullptr;
  std::vector<std::string_view> pieces;  // go to the file one behind another
  int64_t size = 0;                      // of all pieces
  int64_t offset = 0;
  int slot = -1;
};

/// How a Writer writes.
struct WriterOptions {
  int num_threads = 1;
  size_t capacity = 1;                           // requests that may wait; `submit` blocks for one more
  int niceness = 0;                              // added to the niceness of the threads
  int64_t bytes_per_s = 0;                       // limit of all threads together; 0: as fast as the storage takes them
  double io_timeout_s = 0;                       // how long one write may take; 0: for ever
  std::shared_ptr<base::Trace> trace = nullptr;  // records the writes; null: nothing does
};

/// Threads that write slots to files while their owner fills others.
///
///     submit(slot) --> queue --> threads: pwrite --> released(slot): the owner may fill it again
///
/// After the first failure nothing more is written, but slots are still released, so that the owner never waits for
/// ever. A write that takes too long is also a failure. Its slot is not released before the write ends, so an owner
/// that waits for slots must look at `status` meanwhile. Thread-safe, except `finish` and the destructor.
class Writer {
 public:
  /// \param released  Called from a writer thread with the slot of each request that is done, also after a failure. It
  /// must not block.
  Writer(const WriterOptions& options, std::function<void(int)> released);
  /// Waits for all that was submitted, also for a write that takes too long.
  ~Writer();

  /// Starts more threads. Called by the thread that submits.
  void add_threads(int num_threads);
  /// Queues a request. Blocks while the queue is full.
  void submit(WriteRequest request);
  /// Counts bytes that its owner has written itself.
  void count(int64_t bytes);
  /// Returns the number of bytes written so far.
  int64_t bytes_written();
  /// Stops writing, as after a failure. The status becomes kCancelled, unless a write had failed before.
  void cancel();
  /// \returns the first failure so far, which may be a write that is taking too long.
  base::Status status();
  /// Waits until all that was submitted is written and its slots are released, or a write takes too long. \returns the
  /// first failure.
  base::Status drain();
  /// The same, and ends the threads: nothing may be submitted afterwards.
  base::Status finish();
  /// Whether writes have a limit of time.
  bool is_bounded() const { return pending_.is_bounded(); }

 private:
  /// Ends all threads and joins them.
  void stop();
  base::Status carry_out(const WriteRequest& request, int thread, base::TraceLane* lane);
  void run(int thread);
  base::Status wait_until_zero(const int64_t& count);
  void fail(base::Status failure) BCP_REQUIRES(mutex_);
  /// Waits until the limit of speed allows `bytes` more, or writing has stopped.
  void wait_for_turn(int64_t bytes);

  base::BoundedQueue<WriteRequest> queue_;
  const std::function<void(int)> released_;
  const int64_t bytes_per_s_;
  const int niceness_;
  const std::shared_ptr<base::Trace> trace_;
  PendingCalls pending_;
  base::Mutex mutex_;
  int64_t running_ BCP_GUARDED_BY(mutex_) = 0;    // threads
  int64_t unwritten_ BCP_GUARDED_BY(mutex_) = 0;  // requests
  base::Status first_failure_ BCP_GUARDED_BY(mutex_);
  int64_t bytes_written_ BCP_GUARDED_BY(mutex_) = 0;
  std::chrono::steady_clock::time_point next_turn_ BCP_GUARDED_BY(mutex_);
  std::condition_variable failed_, ended_;
  std::vector<std::thread> threads_;
};

}  // namespace bytecheckpoint::io
