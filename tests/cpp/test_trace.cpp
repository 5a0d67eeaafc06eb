// SPDX-License-Identifier: Apache-2.0
#include "csrc/base/trace.h"

#include <numeric>
#include <random>
#include <thread>

#include "tests/cpp/expect.h"

namespace bytecheckpoint::base {
namespace {

constexpr int64_t kMs = 1'000'000;

int64_t busy(const std::vector<Span>& spans, Phase phase) {
  int64_t sum = 0;
  for (const Span& span : spans) sum += span.phase == phase ? span.busy_ns : 0;
  return sum;
}

TEST_CASE("trace: a phase has a name, by which it is found") {
  for (size_t p = 0; p < kNumPhases; ++p) {
    const auto phase = static_cast<Phase>(p);
    CHECK_FALSE(name_of(phase).empty());
    CHECK(find_phase(name_of(phase)) == phase);
  }
  CHECK(name_of(Phase::kRequest) == "request");
  CHECK_FALSE(find_phase("").has_value());
  CHECK_FALSE(find_phase("writes").has_value());
}

TEST_CASE("trace: a size belongs to a power of two") {
  CHECK(size_class(-1) == 0);
  CHECK(size_class(0) == 0);
  CHECK(size_class(1) == 0);
  CHECK(size_class(2) == 1);
  CHECK(size_class(16383) == 13);
  CHECK(size_class(16384) == 14);
  CHECK(size_class(INT64_MAX) == kNumSizeClasses - 1);
}

TEST_CASE("trace: work that is near becomes one span, also if another phase lies between") {
  TraceLane lane("fill", {kMs, 1024});
  lane.add(Phase::kCopy, 0, 2 * kMs, 100);
  lane.add(Phase::kWaitSlot, 2 * kMs, 3 * kMs);
  lane.add(Phase::kCopy, 3 * kMs, 4 * kMs, 50);
  lane.add(Phase::kCopy, 6 * kMs, 7 * kMs, 7);
  std::vector<Span> copies;
  for (const Span& span : lane.spans()) {
    if (span.phase == Phase::kCopy) copies.push_back(span);
  }
  REQUIRE(copies.size() == 2);
  CHECK(copies[0].begin_ns == 0);
  CHECK(copies[0].end_ns == 4 * kMs);
  CHECK(copies[0].busy_ns == 3 * kMs);
  CHECK(copies[0].count == 2);
  CHECK(copies[0].bytes == 150);
  CHECK(copies[1].begin_ns == 6 * kMs);
  CHECK(lane.totals()[static_cast<size_t>(Phase::kCopy)].bytes == 157);
  CHECK(lane.total_of_size(Phase::kCopy, 6).count == 1);
  CHECK(lane.total_of_size(Phase::kCopy, 5).bytes == 50);
}

TEST_CASE("trace: however much is added, a lane stays small and loses no time") {
  std::mt19937_64 random(5);
  for (const int64_t join_ns : {int64_t{0}, int64_t{50}, kMs}) {
    TraceLane lane("write 0", {join_ns, 200});
    int64_t now = 0, sum_of_writes = 0, last_end = 0;
    for (int i = 0; i < 50'000; ++i) {
      now += static_cast<int64_t>(random() % 5000);
      const auto phase = random() % 3 == 0 ? Phase::kSync : Phase::kWrite;
      const auto took = static_cast<int64_t>(random() % 3000);
      lane.add(phase, now, now + took, 10);
      now += took;
      if (phase != Phase::kWrite) continue;
      sum_of_writes += took;
      last_end = now;
    }
    const std::vector<Span> spans = lane.spans();
    CHECK(spans.size() <= 200 + kNumPhases);
    CHECK(spans.size() >= 2);
    CHECK(busy(spans, Phase::kWrite) == sum_of_writes);
    CHECK(lane.totals()[static_cast<size_t>(Phase::kWrite)].busy_ns == sum_of_writes);
    int64_t end = -1, count = 0;
    for (const Span& span : spans) {
      count += span.count;
      CHECK(span.busy_ns <= span.end_ns - span.begin_ns);
      if (span.phase != Phase::kWrite) continue;
      CHECK(span.begin_ns > end);
      end = span.end_ns;
    }
    CHECK(end == last_end);
    CHECK(count == 50'000);
  }
}

TEST_CASE("trace: threads add to lanes of their own while another one looks") {
  Trace trace({0, 128});
  std::vector<std::thread> threads;
  for (int t = 0; t < 4; ++t) {
    threads.emplace_back([&trace, t] {
      TraceLane* const lane = trace.lane("write " + std::to_string(t));
      for (int i = 0; i < 5000; ++i) {
        const SpanTimer timer(lane, Phase::kWrite, i);
        lane->count_size(Phase::kCopy, i, 1);
        trace.enter(i % 2 == 0 ? Phase::kWrite : Phase::kSync);
      }
    });
  }
  for (int i = 0; i < 100; ++i) {
    for (TraceLane* lane : trace.lanes()) {
      (void)lane->spans();
      (void)lane->total_of_size(Phase::kCopy, 4);
    }
  }
  for (std::thread& thread : threads) thread.join();
  REQUIRE(trace.lanes().size() == 4);
  for (TraceLane* lane : trace.lanes()) {
    CHECK(trace.lane(lane->name()) == lane);
    CHECK(lane->totals()[static_cast<size_t>(Phase::kWrite)].count == 5000);
    int64_t count = 0;
    for (size_t c = 0; c < kNumSizeClasses; ++c) count += lane->total_of_size(Phase::kCopy, c).count;
    CHECK(count == 5000);
  }
  CHECK(trace.live().phase.load() >= 0);
}

TEST_CASE("trace: without a trace nothing is recorded") {
  const std::shared_ptr<Trace> none;
  CHECK(lane_of(none, "fill") == nullptr);
  const SpanTimer timer(nullptr, Phase::kCopy);
  add_bytes_done(none, 5);
  const auto trace = std::make_shared<Trace>(TraceOptions{});
  add_bytes_done(trace, 5);
  CHECK(trace->live().bytes_done.load() == 5);
}

}  // namespace
}  // namespace bytecheckpoint::base
