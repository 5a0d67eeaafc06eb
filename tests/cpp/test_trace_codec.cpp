// SPDX-License-Identifier: Apache-2.0
#include "csrc/base/trace_codec.h"

#include <algorithm>
#include <random>

#include "tests/cpp/expect.h"

namespace bytecheckpoint::base {
namespace {

constexpr int64_t kUs = 1000;

/// A trace of three lanes with random work, all of it in whole microseconds.
std::unique_ptr<Trace> random_trace(uint64_t seed) {
  std::mt19937_64 random(seed);
  auto trace = std::make_unique<Trace>(TraceOptions{0, 4096});
  for (const char* name : {"call", "fill", "write 0"}) {
    int64_t now = trace->origin_ns();
    for (int i = 0; i < 300; ++i) {
      now += static_cast<int64_t>(random() % 1000 + 1) * kUs;
      const auto took = static_cast<int64_t>(random() % 1000) * kUs;
      trace->lane(name)->add(static_cast<Phase>(random() % kNumPhases), now, now + took,
                             static_cast<int64_t>(random() >> (random() % 40 + 20)));
      now += took;
    }
  }
  return trace;
}

TEST_CASE("trace codec: what is encoded comes back") {
  const std::unique_ptr<Trace> trace = random_trace(1);
  const TraceSummary got = test::value_of(decode_trace(encode_trace(trace.get(), SIZE_MAX)));
  REQUIRE(got.lanes.size() == 3);
  for (size_t l = 0; l < 3; ++l) {
    TraceLane* const lane = trace->lanes()[l];
    CHECK(got.lanes[l].name == lane->name());
    std::vector<Span> spans = lane->spans();
    std::sort(spans.begin(), spans.end(), [](const Span& a, const Span& b) { return a.begin_ns < b.begin_ns; });
    REQUIRE(got.lanes[l].spans.size() == spans.size());
    for (size_t s = 0; s < spans.size(); ++s) {
      const Span& span = got.lanes[l].spans[s];
      CHECK(span.phase == spans[s].phase);
      CHECK(span.begin_ns == (spans[s].begin_ns - trace->origin_ns()) / kUs * kUs);
      CHECK(span.end_ns - span.begin_ns == spans[s].end_ns - spans[s].begin_ns);
      CHECK(span.busy_ns == spans[s].busy_ns);
      CHECK(span.count == spans[s].count);
      CHECK(span.bytes == spans[s].bytes);
    }
  }
  for (size_t p = 0; p < kNumPhases; ++p) {
    WorkTotal total;
    for (TraceLane* lane : trace->lanes()) total.add(lane->totals()[p]);
    CHECK(got.totals[p].count == total.count);
    CHECK(got.totals[p].busy_ns == total.busy_ns);
    CHECK(got.totals[p].bytes == total.bytes);
    WorkTotal of_classes;
    for (const WorkTotal& of_class : got.sizes[p]) of_classes.add(of_class);
    CHECK(of_classes.count == total.count);
    CHECK(of_classes.bytes == total.bytes);
  }
}

TEST_CASE("trace codec: spans are joined until they fit, totals stay") {
  const std::unique_ptr<Trace> trace = random_trace(2);
  const TraceSummary whole = test::value_of(decode_trace(encode_trace(trace.get(), SIZE_MAX)));
  for (const size_t most : {size_t{12000}, size_t{9000}, size_t{7000}, size_t{0}}) {
    const std::string encoded = encode_trace(trace.get(), most);
    const TraceSummary got = test::value_of(decode_trace(encoded));
    size_t num_spans = 0;
    for (size_t l = 0; l < got.lanes.size(); ++l) {
      num_spans += got.lanes[l].spans.size();
      CHECK(got.lanes[l].spans.size() < whole.lanes[l].spans.size());
    }
    CHECK((encoded.size() <= most || num_spans == 0));
    for (size_t p = 0; p < kNumPhases; ++p) {
      CHECK(got.totals[p].busy_ns == whole.totals[p].busy_ns);
      int64_t busy_ns = 0;
      for (const TraceSummary::Lane& lane : got.lanes) {
        for (const Span& span : lane.spans) busy_ns += static_cast<size_t>(span.phase) == p ? span.busy_ns : 0;
      }
      CHECK((num_spans == 0 || busy_ns == whole.totals[p].busy_ns));
    }
  }
  Trace empty{TraceOptions{}};
  CHECK(test::value_of(decode_trace(encode_trace(&empty, 0))).lanes.empty());
}

TEST_CASE("trace codec: damaged bytes are refused or harmless") {
  const std::unique_ptr<Trace> trace = random_trace(3);
  const std::string encoded = encode_trace(trace.get(), 6000);
  for (size_t size = 0; size < encoded.size(); ++size) CHECK_FALSE(decode_trace(encoded.substr(0, size)).is_ok());
  CHECK_FALSE(decode_trace(encoded + '\0').is_ok());
  std::mt19937_64 random(4);
  for (int i = 0; i < 20'000; ++i) {
    std::string damaged = encoded;
    for (uint64_t n = random() % 3 + 1; n > 0; --n) {
      damaged[random() % std::min<size_t>(damaged.size(), i % 2 == 0 ? 100 : SIZE_MAX)] = static_cast<char>(random());
    }
    const auto got = decode_trace(damaged);
    if (!got.is_ok()) {
      CHECK(got.status().code() == Code::kCorrupt);
      continue;
    }
    for (const TraceSummary::Lane& lane : got.value().lanes) {
      for (const Span& span : lane.spans) CHECK(span.end_ns >= span.begin_ns);
    }
  }
}

}  // namespace
}  // namespace bytecheckpoint::base
