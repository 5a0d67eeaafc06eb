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

/// What a save asks of the arena.
struct ArenaTerms {
  int64_t limit_bytes = 0;    // of one state; 0: what memory the system has left
  bool is_shareable = false;  // with another process
  int num_states = 1;         // kept at the same time, 1 or 2
  std::string what;           // the state is, for messages
};

/// Who takes a region of the arena.
struct LeaseHolder {
  int64_t bytes = 0;
  double held_s = 0;  // so far
  std::string what;
};

/// The memory in which a process keeps states until they are saved: a region for one state at a time, or two. A region
/// grows to what the largest state takes, and stays mapped and warm between saves. Any thread; nothing of it works in a
/// forked child, where the memory is absent.
class Arena {
 public:
  static Arena& of_process();
  Arena();

  /// Room for a state of `bytes` bytes.
  /// \returns kStagingBusy if states that are kept take all that `terms` allow; kStagingFull if it does not fit.
  base::Result<std::shared_ptr<Lease>> try_lease(int64_t bytes, const ArenaTerms& terms);

  /// Maps a region of `bytes` bytes and begins to touch its pages, in the background. No effect on one that is in use.
  base::Status prepare(int64_t bytes, const ArenaTerms& terms);

  /// Waits until a lease ends, at most for `timeout`; may return before.
  void wait_for_release(std::chrono::milliseconds timeout);

  /// Gives all regions back; memory that is in use, when its last user is gone.
  void close();

  int64_t mapped_bytes();
  /// Of all leases that have not ended.
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

/// The right to one region of the arena, for one state. Whoever has `pages` may look at its memory for ever; what is in
/// it is the next state's once the lease has ended.
class Lease {
 public:
  ~Lease() { release(); }
  Lease(const Lease&) = delete;
  Lease& operator=(const Lease&) = delete;

  /// Ends the lease. No effect a second time, nor in a forked child. Any thread.
  void release();

  const std::shared_ptr<Pages>& pages() const { return pages_; }
  /// Until the lease ends, whoever reads what was merged here can see whether it has changed.
  void keep_sums(StagedBytes staged);
  /// These, for another process.
  std::string encoded_sums();

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
