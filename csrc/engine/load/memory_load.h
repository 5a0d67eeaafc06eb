// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <functional>
#include <memory>
#include <optional>
#include <vector>

#include "csrc/base/mutex.h"
#include "csrc/base/status.h"
#include "csrc/base/trace.h"
#include "csrc/engine/load/destinations.h"
#include "csrc/engine/load/segment_source.h"
#include "csrc/planner/load_plan.h"

namespace bytecheckpoint::engine {

/// Reads segments from a file system in the memory of this machine, where there is nothing to wait for.
///
/// Each of a few threads, the caller's among them, does all of it for a piece that stays in the cache of its core:
///
///     file --- pread ---> the caller's memory, if that takes all of the piece: CRC
///                    ---> else a buffer of 256 KiB --- CRC, copy ---> the caller's memory
///
/// What is in the memory of another machine comes in whole segments, of which each thread asks for one.
///
/// So the bytes cross the memory bus twice; by way of the slots of a ring it is four times. Threads write to the
/// caller's memory here, which is no danger: a read from memory ends, so there is no limit of time, and `run` returns
/// when all of them have ended.
class MemoryLoad {
 public:
  /// \param segments      Of up to a slot each, at least one.
  /// \param destinations  `destinations->is_plain()` must be true. All arguments outlive this.
  MemoryLoad(SourceFiles* files, const std::vector<planner::ReadSegment>& segments, Destinations* destinations,
             std::shared_ptr<base::Trace> trace);

  /// Called in the calling thread after each segment that this thread has read, and at the end, with the bytes read by
  /// all threads. Must not throw. \returns an error to end the run.
  using AfterSegment = std::function<base::Status(int64_t bytes_read)>;
  /// Reads all segments. \returns the first error of a thread.
  base::Status run(int num_threads, const AfterSegment& after_segment);

 private:
  struct Worker;

  /// Takes the next segment; nothing at the end, and after an error.
  std::optional<io::ReadRequest> take();
  /// Divides a segment into pieces, each with those that want bytes of it.
  void divide(const io::ReadRequest& request, int64_t piece_bytes, std::vector<planner::ReadSegment>* pieces) const;
  base::Status read(const io::ReadRequest& request, Worker* worker) const;
  /// Notes what became of `bytes` more bytes; the first failure ends the run. \returns how many have been read.
  int64_t note(base::Status outcome, int64_t bytes);

  SourceFiles* const files_;
  const std::vector<planner::ReadSegment>& segments_;
  Destinations* const destinations_;
  const std::shared_ptr<base::Trace> trace_;
  base::Mutex mutex_;
  SegmentSource source_ BCP_GUARDED_BY(mutex_);
  base::Status outcome_ BCP_GUARDED_BY(mutex_);
  int64_t bytes_read_ BCP_GUARDED_BY(mutex_) = 0;
};

}  // namespace bytecheckpoint::engine
