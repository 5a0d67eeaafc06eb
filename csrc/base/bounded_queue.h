// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <chrono>
#include <condition_variable>
#include <cstddef>
#include <deque>
#include <optional>
#include <utility>

#include "csrc/base/mutex.h"

namespace bytecheckpoint::base {

/// First-in first-out queue of at most `capacity` items between threads; the only way data crosses threads here.
///
/// `close` ends it: `push` then declines, `pop` drains what is left and then returns nothing. Safe from any thread.
template <class T>
class BoundedQueue {
 public:
  explicit BoundedQueue(size_t capacity) : capacity_(capacity) {}

  /// Blocks while full. \returns false, dropping the item, if the queue is closed.
  bool push(T item) {
    MutexLock lock(mutex_);
    not_full_.wait(lock, [&] { return closed_ || items_.size() < capacity_; });
    if (closed_) return false;
    items_.push_back(std::move(item));
    not_empty_.notify_one();
    return true;
  }

  /// Blocks while empty and open. \returns nothing once closed and drained.
  std::optional<T> pop() {
    MutexLock lock(mutex_);
    not_empty_.wait(lock, [&] { return closed_ || !items_.empty(); });
    return take();
  }

  /// As `pop`, for no longer than `limit`. \param is_over  Set if the queue is closed and drained.
  std::optional<T> pop_for(std::chrono::milliseconds limit, bool* is_over) {
    MutexLock lock(mutex_);
    not_empty_.wait_for(lock, limit, [&] { return closed_ || !items_.empty(); });
    *is_over = closed_ && items_.empty();
    return take();
  }

  /// \returns nothing while empty.
  std::optional<T> try_pop() {
    MutexLock lock(mutex_);
    return take();
  }

  void close() {
    MutexLock lock(mutex_);
    closed_ = true;
    not_full_.notify_all();
    not_empty_.notify_all();
  }

 private:
  /// With the mutex held. \returns nothing while empty.
  std::optional<T> take() {
    if (items_.empty()) return std::nullopt;
    T item = std::move(items_.front());
    items_.pop_front();
    not_full_.notify_one();
    return item;
  }

  Mutex mutex_;
  std::condition_variable not_full_;
  std::condition_variable not_empty_;
  std::deque<T> items_ BCP_GUARDED_BY(mutex_);
  const size_t capacity_;
  bool closed_ BCP_GUARDED_BY(mutex_) = false;
};

}  // namespace bytecheckpoint::base
