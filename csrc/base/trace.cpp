// SPDX-License-Identifier: Apache-2.0
#include "csrc/base/trace.h"

#include <algorithm>
#include <utility>

namespace bytecheckpoint::base {
namespace {

constexpr std::array<std::string_view, kNumPhases> kPhaseNames = {
    "stage",     "plan",   "global_plan", "begin",    "exchange", "copy",      "checksum", "wait_slot", "write",
    "flush",     "sync",   "wait",        "assemble", "digest",   "commit",    "sweep",    "metadata",  "read",
    "wait_read", "verify", "scatter",     "send",     "receive",  "wait_peer", "objects",  "request"};
static_assert(!kPhaseNames.back().empty(), "each phase has a name");

/// The resolution of a lane that joined nothing so far, when it has to.
constexpr int64_t kLeastJoinNs = 1000;

void add_relaxed(std::atomic<int64_t>* counter, int64_t value) {  // only one thread writes it
  counter->store(counter->load(std::memory_order_relaxed) + value, std::memory_order_relaxed);
}

void extend(Span* span, const Span& next) {
  span->end_ns = std::max(span->end_ns, next.end_ns);
  span->busy_ns += next.busy_ns;
  span->count += next.count;
  span->bytes += next.bytes;
}

}  // namespace

std::string_view name_of(Phase phase) {
  return kPhaseNames[static_cast<size_t>(phase)];
}

std::optional<Phase> find_phase(std::string_view name) {
  const auto* const found = std::find(kPhaseNames.begin(), kPhaseNames.end(), name);
  if (found == kPhaseNames.end()) return std::nullopt;
  return static_cast<Phase>(found - kPhaseNames.begin());
}

size_t size_class(int64_t bytes) {
  if (bytes < 2) return 0;
  return std::min<size_t>(63U - static_cast<size_t>(__builtin_clzll(static_cast<uint64_t>(bytes))),
                          kNumSizeClasses - 1);
}

void join_spans(std::vector<Span>* spans, int64_t join_ns) {
  constexpr size_t kNone = SIZE_MAX;
  std::array<size_t, kNumPhases> last{};
  last.fill(kNone);
  size_t kept = 0;
  for (const Span& span : *spans) {
    size_t& of_phase = last[static_cast<size_t>(span.phase)];
    if (of_phase != kNone && span.begin_ns - (*spans)[of_phase].end_ns <= join_ns) {
      extend(&(*spans)[of_phase], span);
    } else {
      of_phase = kept;
      (*spans)[kept++] = span;
    }
  }
  spans->resize(kept);
}

TraceLane::TraceLane(std::string name, const TraceOptions& options)
    : name_(std::move(name)),
      capacity_(std::max(options.spans_of_lane, 4 * kNumPhases)),
      join_ns_(std::max<int64_t>(options.join_ns, 0)) {}

void TraceLane::add(Phase phase, int64_t begin_ns, int64_t end_ns, int64_t bytes) {
  MutexLock lock(mutex_);
  count_size(phase, bytes, end_ns - begin_ns);
  push({phase, begin_ns, end_ns, end_ns - begin_ns, 1, bytes});
}

void TraceLane::add_span(const Span& span) {
  MutexLock lock(mutex_);
  push(span);
}

void TraceLane::count_size(Phase phase, int64_t bytes, int64_t busy_ns) {
  Counter& counter = sizes_[static_cast<size_t>(phase)][size_class(bytes)];
  add_relaxed(&counter.count, 1);
  add_relaxed(&counter.busy_ns, busy_ns);
  add_relaxed(&counter.bytes, bytes);
}

void TraceLane::push(const Span& span) {
  totals_[static_cast<size_t>(span.phase)].add({span.count, span.busy_ns, span.bytes});
  std::optional<Span>& open = open_[static_cast<size_t>(span.phase)];
  if (open.has_value() && span.begin_ns - open->end_ns <= join_ns_) {
    extend(&*open, span);
    return;
  }
  if (open.has_value()) {
    if (spans_.capacity() == 0) spans_.reserve(capacity_);
    spans_.push_back(*open);
    // Half of the room comes free at once: the next spans must not make it join again and again.
    const size_t room = spans_.size() < capacity_ ? capacity_ : capacity_ / 2;
    while (spans_.size() > room) {
      join_ns_ = std::max(2 * join_ns_, kLeastJoinNs);
      join_spans(&spans_, join_ns_);
    }
  }
  open = span;
}

std::vector<Span> TraceLane::spans() {
  MutexLock lock(mutex_);
  std::vector<Span> all = spans_;
  for (const std::optional<Span>& open : open_) {
    if (open.has_value()) all.push_back(*open);
  }
  return all;
}

std::array<WorkTotal, kNumPhases> TraceLane::totals() {
  MutexLock lock(mutex_);
  return totals_;
}

WorkTotal TraceLane::total_of_size(Phase phase, size_t size_class) const {
  const Counter& counter = sizes_[static_cast<size_t>(phase)][size_class];
  return {counter.count.load(std::memory_order_relaxed), counter.busy_ns.load(std::memory_order_relaxed),
          counter.bytes.load(std::memory_order_relaxed)};
}

TraceLane* Trace::lane(const std::string& name) {
  MutexLock lock(mutex_);
  for (const auto& known : lanes_) {
    if (known->name() == name) return known.get();
  }
  lanes_.push_back(std::make_unique<TraceLane>(name, options_));
  return lanes_.back().get();
}

std::vector<TraceLane*> Trace::lanes() {
  MutexLock lock(mutex_);
  std::vector<TraceLane*> all;
  for (const auto& lane : lanes_) all.push_back(lane.get());
  return all;
}

}  // namespace bytecheckpoint::base
