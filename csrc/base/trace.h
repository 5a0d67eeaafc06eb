// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <array>
#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "csrc/base/mutex.h"

namespace bytecheckpoint::base {

/// What a thread does in a save or a load. Reports and journals hold the names (`name_of`), so a name keeps its
/// meaning.
enum class Phase : uint8_t {
  kStage,       // copies the state for a background save
  kPlan,        // makes the plan of this rank
  kGlobalPlan,  // gathers the plans of all ranks, and decides which rank writes what
  kBegin,       // takes the right to commit
  kExchange,    // plans travel; mostly waits for other ranks
  kCopy,        // copies strided memory to a slot
  kChecksum,    // computes CRCs of what was copied
  kWaitSlot,    // waits for a free slot: storage is slower than memory
  kWrite,       // pwrite
  kFlush,       // waits for the last writes
  kSync,        // size, fsync, close
  kWait,        // waits until all other ranks are done
  kAssemble,    // joins what was planned with what was written
  kDigest,      // reads back what was written
  kCommit,      // checks all files, writes and renames `.metadata`
  kSweep,       // removes files of older saves
  kMetadata,    // reads `.metadata`
  kRead,        // pread
  kWaitRead,    // waits for a read: storage is slower than memory
  kVerify,      // compares CRCs of what was read
  kScatter,     // copies what was read to its tensors
  kSend,        // hands what was read to other ranks
  kReceive,     // takes what another rank has read
  kWaitPeer,    // waits for another rank of a shared load
  kObjects,     // reads and unpacks what is not a tensor
  kRequest,     // a request to an object store
};
constexpr size_t kNumPhases = static_cast<size_t>(Phase::kRequest) + 1;

std::string_view name_of(Phase phase);
/// \returns nothing if no phase has that name.
std::optional<Phase> find_phase(std::string_view name);

/// Nanoseconds of the steady clock, which on Linux is CLOCK_MONOTONIC: all processes of a machine have the same.
inline int64_t now_ns() {
  return std::chrono::duration_cast<std::chrono::nanoseconds>(std::chrono::steady_clock::now().time_since_epoch())
      .count();
}

/// Pieces of work of one phase in one thread. Those between which less than the lane's resolution passed are one span.
struct Span {
  Phase phase{};
  int64_t begin_ns = 0;
  int64_t end_ns = 0;
  int64_t busy_ns = 0;  // without the gaps
  int64_t count = 0;    // pieces of work
  int64_t bytes = 0;
};

/// Work of one kind: how much of it there was.
struct WorkTotal {
  int64_t count = 0;
  int64_t busy_ns = 0;
  int64_t bytes = 0;

  void add(const WorkTotal& other) {
    count += other.count;
    busy_ns += other.busy_ns;
    bytes += other.bytes;
  }
};

constexpr size_t kNumSizeClasses = 48;
/// Returns the power of two that a size belongs to: 0 for up to one byte, else the logarithm, rounded down.
size_t size_class(int64_t bytes);

/// How much a trace keeps.
struct TraceOptions {
  int64_t join_ns = 1'000'000;  // resolution at the beginning: pieces of work that are closer become one span
  size_t spans_of_lane = 1024;  // when a lane has so many spans, its resolution doubles until it has half of them
};

/// What one thread of a save or a load did. Whatever the number of pieces of work, it takes the same memory and covers
/// all of the time: if it is full, neighbouring spans of a phase are joined.
///
///     add:   copy |==| |==||==|       |==|           one thread, seen as a track for each phase
///            wait     |       |=======|
///     later: copy |===========|       |==|           the resolution has doubled: gaps below it are closed
///
/// Thread-safe. `count_size` takes no lock, but only one thread may call it.
class TraceLane {
 public:
  TraceLane(std::string name, const TraceOptions& options);

  const std::string& name() const { return name_; }
  /// Adds one piece of work, and counts its size.
  void add(Phase phase, int64_t begin_ns, int64_t end_ns, int64_t bytes = 0);
  /// Adds work that is joined already, and whose sizes were counted by `count_size`.
  void add_span(const Span& span);
  /// Counts a piece of work by its size alone.
  void count_size(Phase phase, int64_t bytes, int64_t busy_ns);

  /// Returns the spans so far, each phase in the order of time.
  std::vector<Span> spans();
  std::array<WorkTotal, kNumPhases> totals();
  WorkTotal total_of_size(Phase phase, size_t size_class) const;

 private:
  struct Counter {
    std::atomic<int64_t> count{0}, busy_ns{0}, bytes{0};
  };
  void push(const Span& span) BCP_REQUIRES(mutex_);

  const std::string name_;
  const size_t capacity_;
  std::array<std::array<Counter, kNumSizeClasses>, kNumPhases> sizes_;
  Mutex mutex_;
  int64_t join_ns_ BCP_GUARDED_BY(mutex_);
  std::array<std::optional<Span>, kNumPhases> open_ BCP_GUARDED_BY(mutex_);  // the last span of each phase
  std::vector<Span> spans_ BCP_GUARDED_BY(mutex_);
  std::array<WorkTotal, kNumPhases> totals_ BCP_GUARDED_BY(mutex_);
};

/// Joins neighbouring spans of each phase between which no more than `join_ns` passed. Their order stays.
void join_spans(std::vector<Span>* spans, int64_t join_ns);

/// What a save or a load is doing now, for whoever looks at it from outside. It may lie in memory that other processes
/// map, so it holds plain numbers alone.
struct LiveCounters {
  std::atomic<int64_t> phase{-1};      // as a number; -1 before the first, and after the call
  std::atomic<int64_t> since_ns{0};    // when that phase began
  std::atomic<int64_t> bytes_done{0};  // written to storage, or read from it
  std::atomic<int64_t> bytes_expected{0};
};
static_assert(std::atomic<int64_t>::is_always_lock_free, "other processes read these without our locks");

/// What all threads of one rank did in one save or load. Thread-safe. Pass it on as a `std::shared_ptr`: threads that
/// wait for storage may live longer than the call.
class Trace {
 public:
  /// \param live  Not null. Where the trace says what is being done now.
  explicit Trace(const TraceOptions& options, std::shared_ptr<LiveCounters> live = std::make_shared<LiveCounters>())
      : options_(options), origin_ns_(now_ns()), live_(std::move(live)) {}

  /// When the trace was made; all times that `encode` writes are relative to it.
  int64_t origin_ns() const { return origin_ns_; }
  LiveCounters& live() { return *live_; }
  /// Notes which phase the call is in from now on.
  void enter(Phase phase) {
    live_->since_ns.store(now_ns(), std::memory_order_relaxed);
    live_->phase.store(static_cast<int64_t>(phase), std::memory_order_relaxed);
  }
  /// Notes that the call has ended.
  void leave() { live_->phase.store(-1, std::memory_order_relaxed); }
  /// Returns the lane of that name, which lives as long as the trace. It is made if there is none.
  TraceLane* lane(const std::string& name);
  /// All lanes so far, in the order in which they were made.
  std::vector<TraceLane*> lanes();

 private:
  const TraceOptions options_;
  const int64_t origin_ns_;
  const std::shared_ptr<LiveCounters> live_;
  Mutex mutex_;
  std::vector<std::unique_ptr<TraceLane>> lanes_ BCP_GUARDED_BY(mutex_);
};

/// Notes bytes that were written to storage, or read from it.
inline void add_bytes_done(const std::shared_ptr<Trace>& trace, int64_t bytes) {
  if (trace != nullptr) trace->live().bytes_done.fetch_add(bytes, std::memory_order_relaxed);
}

/// Returns a lane of a trace; null if there is no trace, and so nothing is recorded.
inline TraceLane* lane_of(const std::shared_ptr<Trace>& trace, const std::string& name) {
  return trace == nullptr ? nullptr : trace->lane(name);
}

/// Adds its lifetime to a lane, if there is one.
class SpanTimer {
 public:
  SpanTimer(TraceLane* lane, Phase phase, int64_t bytes = 0)
      : lane_(lane), phase_(phase), bytes_(bytes), begin_ns_(lane == nullptr ? 0 : now_ns()) {}
  ~SpanTimer() {
    if (lane_ != nullptr) lane_->add(phase_, begin_ns_, now_ns(), bytes_);
  }
  SpanTimer(const SpanTimer&) = delete;
  SpanTimer& operator=(const SpanTimer&) = delete;

 private:
  TraceLane* const lane_;
  const Phase phase_;
  const int64_t bytes_;
  const int64_t begin_ns_;
};

}  // namespace bytecheckpoint::base
