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

/// Host memory in pages of 2 MiB, where the system gives them. A page is touched when it is first used, or ahead of
/// that by `populate`.
class Pages {
 public:
  enum class InFork {
    kCopied,  // a forked child has the memory, too, as it was
    kAbsent,  // it has not, so that writing on in the parent copies nothing
  };
  /// Zeroed memory that begins at a multiple of kHugePageBytes. \param what  Names it in errors.
  static base::Result<std::unique_ptr<Pages>> map(int64_t bytes, std::string_view what, InFork in_fork);
  /// The same that another process can map, by `fd`; absent in forked children.
  static base::Result<std::unique_ptr<Pages>> map_shareable(int64_t bytes, std::string_view what);
  /// What another process shares. \param fd  Stays the caller's.
  static base::Result<std::unique_ptr<Pages>> map_shared(int fd, int64_t bytes, std::string_view what);
  ~Pages();
  Pages(const Pages&) = delete;
  Pages& operator=(const Pages&) = delete;

  /// Begins to touch the first `bytes` bytes, in a thread of its own, and returns. The memory may be used meanwhile.
  /// One thread at a time calls this.
  void populate(int64_t bytes);

  /// Keeps something that has to end before the memory is unmapped, as page-locking of its first `held_bytes`, in the
  /// place of what was kept. One thread at a time.
  void hold(std::shared_ptr<void> held, int64_t held_bytes) {
    held_ = std::move(held);
    held_bytes_ = held_bytes;
  }
  int64_t held_bytes() const { return held_bytes_; }

  uint8_t* first() const { return first_; }
  int64_t bytes() const { return bytes_; }
  /// Of the memory, if another process can map it; else -1.
  int fd() const { return fd_; }

 private:
  explicit Pages(int64_t bytes);
  base::Status map_at_huge_page(std::string_view what, InFork in_fork);
  void stop_populating();

  void* mapping_ = nullptr;
  size_t mapping_bytes_ = 0;
  uint8_t* first_ = nullptr;
  const int64_t bytes_;
  int fd_ = -1;
  InFork in_fork_ = InFork::kAbsent;
  const pid_t owner_;
  std::shared_ptr<void> held_;
  int64_t held_bytes_ = 0;
  int64_t populated_bytes_ = 0;  // that were asked for
  std::atomic<bool> stop_{false};
  std::thread populating_;
};

}  // namespace bytecheckpoint::staging
