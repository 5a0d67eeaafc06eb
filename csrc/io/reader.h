// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <chrono>
#include <condition_variable>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <thread>
#include <vector>

#include "csrc/base/bounded_queue.h"
#include "csrc/base/status.h"
#include "csrc/base/trace.h"
#include "csrc/io/file.h"
#include "csrc/io/pending_calls.h"

namespace bytecheckpoint::io {

/// A range of a file to read into one slot.
struct ReadRequest {
  std::shared_ptr<File> file;
  int64_t offset = 0;
  int64_t wanted = 0;  // bytes that the file must have there
  int64_t size = 0;    // bytes to ask for: `wanted`, rounded up for direct I/O
  size_t tag = 0;      // for the owner's use
};

/// A filled slot, or the error of filling it.
struct FilledSlot {
  int slot = -1;  // -1 on failure
  ReadRequest request;
  base::Status status;
};

/// Threads that read files into slots, ahead of their consumer.
///
///     source --> threads: pread --> filled slots --> next(): the consumer --> release() --> free slots --> threads
///
/// A slot belongs to the threads until `next` returns it, and to the consumer until `release`. So the number of slots
/// bounds how far reading runs ahead. Slots are filled in the order of the requests, but may be returned in any order.
///
/// `next` returns a read that fails as an error. It ends the thread that met it; the other threads go on. After an
/// error of `source` no thread asks for more. When all requests are answered, `next` returns nothing. Thread-safe.
///
/// Of many requests to an object store, one may take far longer than the others. With `doubles_slow_reads`, a thread
/// that has no request left reads what another thread has been reading for too long, into a slot of its own. Whoever is
/// done first answers the request. Each request is doubled once at most:
///
///     thread 1   [ a ][ c ][ e ]
///     thread 2   [ b ][ d .............................    the answer of thread 1 counts, and the load is over
///     thread 1                       [ d ]
class Reader {
 public:
  using Source = std::function<base::Result<std::optional<ReadRequest>>()>;

  /// \param num_threads   0 if there is nothing to read.
  /// \param source        Returns the next request; nothing at the end. Called by one thread at a time.
  /// \param slot_bytes    Returns the memory of slot number i.
  /// \param io_timeout_s  How long one read, or one call of `source`, may take; 0: for ever.
  /// \param place         Named in the error if `source` takes too long.
  /// \param trace         Records the reads; null: nothing does.
  Reader(int num_threads, int num_slots, Source source, std::function<uint8_t*(int)> slot_bytes,
         double io_timeout_s = 0, std::string place = {}, bool doubles_slow_reads = false,
         std::shared_ptr<base::Trace> trace = nullptr);
  /// Waits for the reads in flight, also for those that take too long, and ends the threads.
  ~Reader();

  /// Returns the next filled slot, in any order; nothing when all is read. Blocks, but not longer than a read may take.
  std::optional<FilledSlot> next();
  /// The same without blocking: also returns nothing if no slot is filled yet.
  std::optional<FilledSlot> try_next();
  /// Number of requests that were doubled so far.
  int num_doubled();
  /// Gives a slot back, to be filled again.
  void release(int slot) { free_.push(slot); }

 private:
  using Clock = std::chrono::steady_clock;

  /// A request that is being read, by one thread or two.
  struct Reading {
    ReadRequest request;
    Clock::time_point since;
    std::vector<int> threads;  // that read it now
    bool is_doubled = false;
    bool is_answered = false;
  };

  /// Ends all threads and joins them.
  void stop();
  void run(int thread);
  /// Takes the next request. \returns null at the end, which is also behind an error of `source_`.
  std::shared_ptr<Reading> pull(int thread);
  /// Waits until a read takes too long, to double it. \returns null when there will be none.
  std::shared_ptr<Reading> wait_for_slow(int thread);
  /// Reads into `slot`, which belongs to the consumer afterwards if this answers the request.
  /// \returns whether the thread goes on.
  bool read(int thread, const std::shared_ptr<Reading>& reading, int slot, base::TraceLane* lane);
  Clock::duration too_long() const BCP_REQUIRES(mutex_);
  /// Closes the queue of filled slots when nothing can come any more.
  void close_if_over() BCP_REQUIRES(mutex_);

  const std::string place_;
  const bool doubles_slow_reads_;
  const std::shared_ptr<base::Trace> trace_;
  PendingCalls pending_;
  base::Mutex mutex_;
  std::condition_variable changed_;
  Source source_ BCP_GUARDED_BY(mutex_);
  bool exhausted_ BCP_GUARDED_BY(mutex_) = false;
  bool stopped_ BCP_GUARDED_BY(mutex_) = false;
  int running_ BCP_GUARDED_BY(mutex_);
  std::vector<std::shared_ptr<Reading>> unanswered_ BCP_GUARDED_BY(mutex_);
  int num_doubled_ BCP_GUARDED_BY(mutex_) = 0;
  int64_t num_read_ BCP_GUARDED_BY(mutex_) = 0;
  Clock::duration time_read_ BCP_GUARDED_BY(mutex_){};  // of all of them
  const std::function<uint8_t*(int)> slot_bytes_;
  base::BoundedQueue<int> free_;
  base::BoundedQueue<FilledSlot> filled_;
  std::vector<std::thread> threads_;
};

}  // namespace bytecheckpoint::io
