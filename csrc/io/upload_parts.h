// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <condition_variable>
#include <cstdint>
#include <map>
#include <memory>

#include "csrc/base/mutex.h"
#include "csrc/base/status.h"

namespace bytecheckpoint::io {

/// The parts of one upload, on their way from the writer's threads, which have them in slots, to the client of the
/// store.
///
///     writer's threads: write(part) --+                                +--> next(): the client uploads it
///                                     |--> parts, by offset, in order --|
///     ... which waits for this part <-+                                +--- release(): the client is done with it
///
/// A writer's thread waits for its part, so as many parts are in flight as there are such threads, and no byte is
/// copied. Thread-safe.
class UploadParts {
 public:
  struct Part {
    const uint8_t* bytes = nullptr;
    int64_t size = 0;
    bool is_released = false;
  };

  /// \param part_bytes  Size of all parts but the last. A shorter one is the last: the client keeps it until it knows
  /// that nothing follows.
  explicit UploadParts(int64_t part_bytes) : part_bytes_(part_bytes) {}

  /// Hands a part over, and waits until it is released. \returns the failure of the upload, if it has failed.
  base::Status write(const uint8_t* bytes, int64_t size, int64_t offset);
  /// Returns the part behind the one that was returned last; null at the end, or after a failure. Blocks until there is
  /// one.
  std::shared_ptr<const Part> next();
  void release(const Part& part);
  /// There are no more parts.
  void end();
  /// Nothing more is uploaded. The first failure counts.
  void fail(base::Status failure);
  base::Status status();

 private:
  const int64_t part_bytes_;
  base::Mutex mutex_;
  std::condition_variable changed_;
  std::map<int64_t, std::shared_ptr<Part>> waiting_ BCP_GUARDED_BY(mutex_);  // by offset
  int64_t next_offset_ BCP_GUARDED_BY(mutex_) = 0;
  bool is_over_ BCP_GUARDED_BY(mutex_) = false;
  base::Status failure_ BCP_GUARDED_BY(mutex_);
};

}  // namespace bytecheckpoint::io
