// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <sys/types.h>

#include <atomic>
#include <cstdint>
#include <memory>
#include <string_view>
#include <thread>
#include <utility>

#include "csrc/base/status.h"

namespace bytecheckpoint::staging {

inline constexpr int64_t kHugePageBytes = 2 << 20;

/// Host memory, in pages of 2 MiB if the system has them. A page is touched when it is first used, or ahead of that by
/// `populate`.
///
///     mapping   |.....|first: a multiple of 2 MiB    bytes      |.......|
///                     |== populated ==>             |
///                     |== page-locked (hold) ==|
///
/// Not thread-safe, except that the memory may be used while `populate` goes on.
class Pages {
 public:
  enum class InFork {
    kCopied,  // a forked child gets a copy of the memory
    kAbsent,  // a forked child does not have it, so that later writes of the parent copy nothing
  };
  /// Maps zeroed memory that begins at a multiple of kHugePageBytes. \param what  Names it in errors. \returns
  /// kStorage.
  static base::Result<std::unique_ptr<Pages>> map(int64_t bytes, std::string_view what, InFork in_fork);
  /// The same, for memory that another process can map by `fd`. Absent in forked children.
  static base::Result<std::unique_ptr<Pages>> map_shareable(int64_t bytes, std::string_view what);
  enum class Access { kReadWrite, kRead };
  /// Maps memory that another process shares. \param fd  Stays the caller's. \returns kInvalidArgument if it has fewer
  /// than `bytes` bytes.
  static base::Result<std::unique_ptr<Pages>> map_shared(int fd, int64_t bytes, std::string_view what,
                                                         Access access = Access::kReadWrite);
  ~Pages();
  Pages(const Pages&) = delete;
  Pages& operator=(const Pages&) = delete;

  /// Begins to touch the first `bytes` bytes in a thread of its own, and returns. The memory may be used meanwhile.
  void populate(int64_t bytes);

  /// Makes the memory absent in children that are forked from now on. \returns kStorage.
  base::Status leave_out_of_forks();
  /// Whether this process has the memory.
  bool is_here() const;

  /// Keeps an object that must be destroyed before the memory is unmapped, like the page-locking of its first
  /// `held_bytes`. Replaces what was kept before.
  void hold(std::shared_ptr<void> held, int64_t held_bytes) {
    held_ = std::move(held);
    held_bytes_ = held_bytes;
  }
  int64_t held_bytes() const { return held_bytes_; }

  /// The memory: `bytes()` bytes from `first()` on.
  uint8_t* first() const { return first_; }
  int64_t bytes() const { return bytes_; }
  /// Descriptor of the memory if another process can map it; else -1.
  int fd() const { return fd_; }

 private:
  explicit Pages(int64_t bytes);
  base::Status map_at_huge_page(std::string_view what, InFork in_fork, Access access = Access::kReadWrite);
  void stop_populating();

  void* mapping_ = nullptr;
  size_t mapping_bytes_ = 0;
  uint8_t* first_ = nullptr;
  const int64_t bytes_;
  int fd_ = -1;
  InFork in_fork_ = InFork::kCopied;
  const pid_t owner_;
  std::shared_ptr<void> held_;
  int64_t held_bytes_ = 0;
  int64_t populated_bytes_ = 0;  // how many bytes, from the first, `populate` was asked for
  std::atomic<bool> stop_{false};
  std::thread populating_;
};

}  // namespace bytecheckpoint::staging
