// SPDX-License-Identifier: Apache-2.0
#include "csrc/base/trace_codec.h"

#include <algorithm>

#include "csrc/base/varint.h"

namespace bytecheckpoint::base {
namespace {

constexpr uint8_t kTraceVersion = 1;
constexpr int64_t kNsPerUs = 1000;
constexpr int64_t kFirstJoinNs = 10'000;
constexpr uint64_t kMostNameBytes = 256;

uint64_t us(int64_t ns) {
  return static_cast<uint64_t>(std::max<int64_t>(ns, 0) / kNsPerUs);
}

void put(VarintWriter* out, const WorkTotal& total) {
  out->number(static_cast<uint64_t>(total.count));
  out->number(us(total.busy_ns));
  out->number(static_cast<uint64_t>(total.bytes));
}

/// Reads microseconds. Fails if they are more than nanoseconds in an int64 can be.
int64_t get_ns(VarintReader* in) {
  const int64_t value = in->i64();
  if (value > INT64_MAX / 4 / kNsPerUs) in->fail();
  return in->ok() ? value * kNsPerUs : 0;
}

WorkTotal get(VarintReader* in) {
  WorkTotal total;
  total.count = in->i64();
  total.busy_ns = get_ns(in);
  total.bytes = in->i64();
  return total;
}

std::string encode_spans(const std::vector<Span>& spans, int64_t origin_ns) {
  VarintWriter out;
  out.number(spans.size());
  uint64_t before = 0;
  for (const Span& span : spans) {
    const uint64_t begin = us(span.begin_ns - origin_ns);
    out.u8(static_cast<uint8_t>(span.phase));
    // Spans are sorted by their begin.
    out.number(begin - before);
    out.number(us(span.end_ns - span.begin_ns));
    out.number(us(span.busy_ns));
    out.number(static_cast<uint64_t>(span.count));
    out.number(static_cast<uint64_t>(span.bytes));
    before = begin;
  }
  return out.take();
}

std::vector<Span> decode_spans(VarintReader* in) {
  std::vector<Span> spans(in->count(6));
  int64_t begin_ns = 0;
  for (Span& span : spans) {
    const uint8_t phase = in->u8();
    if (phase >= kNumPhases) in->fail();
    span.phase = static_cast<Phase>(std::min<uint8_t>(phase, kNumPhases - 1));
    begin_ns += get_ns(in);
    if (begin_ns > INT64_MAX / 4) in->fail();
    if (!in->ok()) return {};
    span.begin_ns = begin_ns;
    span.end_ns = begin_ns + get_ns(in);
    span.busy_ns = get_ns(in);
    span.count = in->i64();
    span.bytes = in->i64();
    if (!in->ok()) return {};
  }
  return spans;
}

}  // namespace

std::string encode_trace(Trace* trace, size_t max_bytes) {
  const std::vector<TraceLane*> lanes = trace->lanes();
  std::array<WorkTotal, kNumPhases> totals{};
  std::array<std::array<WorkTotal, kNumSizeClasses>, kNumPhases> sizes{};
  std::vector<std::vector<Span>> spans;
  for (TraceLane* lane : lanes) {
    const std::array<WorkTotal, kNumPhases> of_lane = lane->totals();
    for (size_t p = 0; p < kNumPhases; ++p) {
      totals[p].add(of_lane[p]);
      for (size_t c = 0; c < kNumSizeClasses; ++c) sizes[p][c].add(lane->total_of_size(static_cast<Phase>(p), c));
    }
    spans.push_back(lane->spans());
    std::sort(spans.back().begin(), spans.back().end(),
              [](const Span& a, const Span& b) { return a.begin_ns < b.begin_ns; });
  }
  VarintWriter out;
  out.u8(kTraceVersion);
  const auto put_some = [&out](const auto& list) {
    out.number(static_cast<uint64_t>(
        std::count_if(list.begin(), list.end(), [](const WorkTotal& total) { return total.count > 0; })));
    for (size_t i = 0; i < list.size(); ++i) {
      if (list[i].count == 0) continue;
      out.u8(static_cast<uint8_t>(i));
      put(&out, list[i]);
    }
  };
  put_some(totals);
  for (size_t p = 0; p < kNumPhases; ++p) {
    if (totals[p].count > 0) put_some(sizes[p]);
  }
  out.number(lanes.size());
  for (const TraceLane* lane : lanes) {
    out.number(lane->name().size());
    out.raw(lane->name());
  }
  std::string text = out.take();
  for (int64_t join_ns = 0; join_ns < INT64_MAX / 4; join_ns = std::max(2 * join_ns, kFirstJoinNs)) {
    std::string encoded;
    for (std::vector<Span>& of_lane : spans) {
      if (join_ns > 0) join_spans(&of_lane, join_ns);
      encoded += encode_spans(of_lane, trace->origin_ns());
    }
    if (text.size() + encoded.size() <= max_bytes) return text + encoded;
  }
  for (size_t lane = 0; lane < lanes.size(); ++lane) text += encode_spans({}, 0);
  return text;
}

Result<TraceSummary> decode_trace(std::string_view bytes) {
  VarintReader in(bytes);
  TraceSummary out;
  if (in.u8() != kTraceVersion) in.fail();
  const auto get_some = [&in](auto* list) {
    for (size_t left = in.count(4); left > 0 && in.ok(); --left) {
      const uint8_t place = in.u8();
      const WorkTotal total = get(&in);
      if (place >= list->size() || total.count == 0) {
        in.fail();
      } else {
        (*list)[place] = total;
      }
    }
  };
  get_some(&out.totals);
  for (size_t p = 0; p < kNumPhases && in.ok(); ++p) {
    if (out.totals[p].count > 0) get_some(&out.sizes[p]);
  }
  const size_t num_lanes = in.count(2);
  for (size_t i = 0; i < num_lanes && in.ok(); ++i) {
    const uint64_t size = in.number();
    if (size > kMostNameBytes) in.fail();
    out.lanes.push_back({std::string(in.ok() ? in.view(size) : std::string_view()), {}});
  }
  for (TraceSummary::Lane& lane : out.lanes) {
    if (in.ok()) lane.spans = decode_spans(&in);
  }
  if (!in.ok() || in.remaining() != 0) return Status::make(Code::kCorrupt, "a trace of spans is damaged");
  return out;
}

}  // namespace bytecheckpoint::base
