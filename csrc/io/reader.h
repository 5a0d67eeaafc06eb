// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <thread>
#include <vector>

#include "csrc/base/bounded_queue.h"
#include "csrc/base/status.h"
#include "csrc/io/file.h"
#include "csrc/io/pending_calls.h"

namespace bytecheckpoint::io {

/// A stretch of a file to be read into one slot.
struct ReadRequest {
  std::shared_ptr<File> file;
  int64_t offset = 0;
  int64_t wanted = 0;  // bytes that must be there
  int64_t size = 0;    // bytes asked of the disk: `wanted`, rounded up for direct I/O
  size_t tag = 0;      // the owner's
};

/// A slot that was filled, or the failure to fill it.
struct FilledSlot {
  int slot = -1;  // none on failure
  ReadRequest request;
  base::Status status;
};

/// Threads that fill slots ahead of their consumer.
class Reader {
 public:
  using Source = std::function<base::Result<std::optional<ReadRequest>>()>;

  /// \param num_threads  0 if there is nothing to read.
  /// \param source     Next request, nothing at the end; called by one thread at a time.
  /// \param slot_bytes Memory of slot number i.
  /// \param io_timeout_s  For which one read, or one call of `source`, may take; 0: for ever.
  /// \param place      Named in errors of `source` that takes too long.
  Reader(int num_threads, int num_slots, Source source, std::function<uint8_t*(int)> slot_bytes,
         double io_timeout_s = 0, std::string place = {});
  /// Stops as soon as the reads in flight return, also those that take too long.
  ~Reader();

  /// Next filled slot in any order, nothing when all is read. Blocks, until a read takes too long. Any thread. A
  /// failure ends the thread it met.
  std::optional<FilledSlot> next();
  /// The same without blocking: nothing also if none is filled yet.
  std::optional<FilledSlot> try_next();
  /// Hands a slot back to be filled again.
  void release(int slot) { free_.push(slot); }

 private:
  /// Ends all threads, and waits for them.
  void stop();
  void run(int thread);
  base::Result<std::optional<ReadRequest>> pull(int thread);

  const std::string place_;
  PendingCalls pending_;
  base::Mutex mutex_;
  Source source_ BCP_GUARDED_BY(mutex_);
  bool exhausted_ BCP_GUARDED_BY(mutex_) = false;
  int running_ BCP_GUARDED_BY(mutex_);
  const std::function<uint8_t*(int)> slot_bytes_;
  base::BoundedQueue<int> free_;
  base::BoundedQueue<FilledSlot> filled_;
  std::vector<std::thread> threads_;
};

}  // namespace bytecheckpoint::io
