// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <sys/types.h>

#include <array>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "csrc/base/mutex.h"
#include "csrc/base/status.h"
#include "csrc/staging/pages.h"
#include "csrc/staging/staged_bytes.h"

namespace bytecheckpoint::staging {

class Lease;

/// The conditions under which a state may be kept in the arena.
struct ArenaTerms {
  int64_t limit_bytes = 0;    // most bytes of one state; 0: as much as the system has left
  bool is_shareable = false;  // another process will map the memory, too
  int num_states = 1;         // most states that are kept at the same time, 1 or 2
  std::string what;           // what the state is; for messages
};

/// Who holds a region of the arena.
struct LeaseHolder {
  int64_t bytes = 0;
  double held_s = 0;  // so far
  std::string what;
};

/// The memory in which a process keeps copies of states until they are saved: two regions, each for one state at a
/// time.
///
///     region 0   | state, leased: being saved               | room to grow |    mapped in pages of 2 MiB
///     region 1   | free, or the next state, if num_states is 2             |
///
///     try_lease -> the caller copies a state there -> the save reads it -> the lease ends -> the region is used again
///
/// A region grows to the largest state, and stays mapped and warm between saves, because touching fresh memory costs
/// more than copying. If a larger one is needed, the old one is given back first: the system may not have room for
/// both.
///
/// Thread-safe. In a forked child the memory is absent: `try_lease` and `prepare` fail with kUnsupported, all else has
/// no effect.
class Arena {
 public:
  /// The arena of this process. It is never destroyed, because leases may end while the process does.
  static Arena& of_process();
  Arena();

  /// Leases a region for a state of `bytes` bytes. Does not wait. The region is not zeroed.
  /// \returns kStagingBusy if the states that are kept take all regions that `terms` allow. kStagingFull if the state
  /// does not fit. kUnsupported in a forked child. kStorage.
  base::Result<std::shared_ptr<Lease>> try_lease(int64_t bytes, const ArenaTerms& terms);

  /// Maps a region of `bytes` bytes, and begins to touch its pages in the background. No effect while a state is in it.
  /// \returns as `try_lease`.
  base::Status prepare(int64_t bytes, const ArenaTerms& terms);

  /// Waits until a lease ends, at most for `timeout`. May return earlier.
  void wait_for_release(std::chrono::milliseconds timeout);

  /// Gives all regions back to the system. Memory that is in use is given back when its last user is gone.
  void close();

  /// Returns the bytes of all regions, used or not.
  int64_t mapped_bytes();
  /// Returns all leases that have not ended.
  std::vector<LeaseHolder> holders();

 private:
  friend class Lease;
  struct Region {
    std::shared_ptr<Pages> pages;
    bool is_leased = false;
    int64_t bytes = 0;  // of the state
    std::chrono::steady_clock::time_point since;
    std::string what;
  };

  base::Status check_process() const;
  base::Status fit(int64_t bytes, const ArenaTerms& terms, Region* region) BCP_REQUIRES(mutex_);
  void release(size_t region);

  const pid_t owner_;
  base::Mutex mutex_;
  std::condition_variable released_;
  std::array<Region, 2> regions_ BCP_GUARDED_BY(mutex_);
};

/// The right to use one region of the arena for one state. When the lease ends, the next state may be copied there.
/// Whoever holds `pages` may read the memory even later, but then finds the next state in it. Thread-safe.
class Lease {
 public:
  ~Lease() { release(); }
  Lease(const Lease&) = delete;
  Lease& operator=(const Lease&) = delete;

  /// Ends the lease. No effect the second time, nor in a forked child.
  void release();

  const std::shared_ptr<Pages>& pages() const { return pages_; }
  /// Keeps the checksums of the state until the lease ends: until then `find_staged` finds them, so that a save can
  /// tell whether the memory has changed.
  void keep_checksums(StagedBytes staged);
  /// Returns these checksums, encoded for another process.
  std::string encoded_checksums();

 private:
  friend class Arena;
  Lease(Arena* arena, size_t region, std::shared_ptr<Pages> pages)
      : arena_(arena), region_(region), pages_(std::move(pages)) {}

  Arena* const arena_;
  const size_t region_;
  const std::shared_ptr<Pages> pages_;
  base::Mutex mutex_;
  bool is_released_ BCP_GUARDED_BY(mutex_) = false;
  std::shared_ptr<const StagedBytes> staged_ BCP_GUARDED_BY(mutex_);
};

}  // namespace bytecheckpoint::staging
