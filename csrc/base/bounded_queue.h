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

/// First-in first-out queue of at most `capacity` items. Data crosses threads only through such queues.
///
/// `close` ends the queue: from then on `push` refuses items, and `pop` returns the items that are left, then nothing.
/// Thread-safe: any thread may call any method. Each call takes one mutex.
template <class T>
class BoundedQueue {
 public:
  /// \param capacity  >= 1.
  explicit BoundedQueue(size_t capacity) : capacity_(capacity) {}

  /// Appends `item`. Blocks while the queue is full and open.
  /// \returns false, and drops the item, if the queue is closed.
  bool push(T item) {
    MutexLock lock(mutex_);
    not_full_.wait(lock, [&] { return closed_ || items_.size() < capacity_; });
    if (closed_) return false;
    items_.push_back(std::move(item));
    not_empty_.notify_one();
    return true;
  }

  /// Takes the first item. Blocks while the queue is empty and open.
  /// \returns nothing if the queue is closed and no item is left.
  std::optional<T> pop() {
    MutexLock lock(mutex_);
    not_empty_.wait(lock, [&] { return closed_ || !items_.empty(); });
    return take();
  }

  /// Does the same as `pop`, but waits for no longer than `limit`.
  /// \param is_over  Set to true if the queue is closed and no item was left, else to false.
  /// \returns nothing if no item came in time, or if the queue is over.
  std::optional<T> pop_for(std::chrono::milliseconds limit, bool* is_over) {
    MutexLock lock(mutex_);
    not_empty_.wait_for(lock, limit, [&] { return closed_ || !items_.empty(); });
    *is_over = closed_ && items_.empty();
    return take();
  }

  /// Takes the first item without waiting. \returns nothing if the queue is empty.
  std::optional<T> try_pop() {
    MutexLock lock(mutex_);
    return take();
  }

  /// Ends the queue and wakes all threads that wait in it. Calling it again changes nothing.
  void close() {
    MutexLock lock(mutex_);
    closed_ = true;
    not_full_.notify_all();
    not_empty_.notify_all();
  }

 private:
  /// Takes the first item, if there is one. The caller holds the mutex.
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
