// SPDX-License-Identifier: Apache-2.0
#include "csrc/bindings/bind.h"

#include <pybind11/stl.h>

#include <memory>
#include <string>
#include <vector>

#include "csrc/base/trace_codec.h"
#include "csrc/bridge/errors.h"
#include "csrc/bridge/unlocked.h"
#include "csrc/io/live_page.h"

namespace bytecheckpoint::bindings {
namespace {

namespace py = pybind11;
using namespace bridge;

constexpr double kNsPerSecond = 1e9;
constexpr int64_t kNsPerUs = 1000;

double seconds(int64_t ns) {
  return static_cast<double>(ns) / kNsPerSecond;
}

base::Phase phase_of(const std::string& name) {
  const auto phase = base::find_phase(name);
  if (!phase.has_value()) throw py::value_error("'" + name + "' is not a phase");
  return *phase;
}

std::shared_ptr<base::Trace> start_trace(int64_t join_ns, size_t spans_of_lane, const std::string& header) {
  auto live = io::make_live_page(header);
  // Without the page nobody outside sees the call; that is all.
  auto counters = live.is_ok() ? std::move(live.value()) : std::make_shared<base::LiveCounters>();
  return std::make_shared<base::Trace>(base::TraceOptions{join_ns, spans_of_lane}, std::move(counters));
}

/// Returns {name: [(log2 of bytes, count, seconds, bytes)]}.
py::dict sizes_of(const base::TraceSummary& summary) {
  py::dict sizes;
  for (size_t p = 0; p < base::kNumPhases; ++p) {
    py::list classes;
    for (size_t c = 0; c < base::kNumSizeClasses; ++c) {
      const base::WorkTotal& of_class = summary.sizes[p][c];
      if (of_class.count == 0) continue;
      classes.append(py::make_tuple(c, of_class.count, seconds(of_class.busy_ns), of_class.bytes));
    }
    if (!classes.empty()) sizes[py::str(std::string(base::name_of(static_cast<base::Phase>(p))))] = std::move(classes);
  }
  return sizes;
}

/// Returns {"phases": {name: (count, seconds, bytes)}, "sizes": {name: [(log2 of bytes, count, seconds, bytes)]},
/// "lanes": [(name, [(phase, begin_us, length_us, busy_us, count, bytes)])]}.
py::dict decode_trace(const py::bytes& encoded) {
  const base::TraceSummary summary = value_or_raise(base::decode_trace(std::string_view(encoded)));
  py::dict phases, out;
  for (size_t p = 0; p < base::kNumPhases; ++p) {
    const base::WorkTotal& total = summary.totals[p];
    if (total.count == 0) continue;
    phases[py::str(std::string(base::name_of(static_cast<base::Phase>(p))))] =
        py::make_tuple(total.count, seconds(total.busy_ns), total.bytes);
  }
  py::list lanes;
  for (const base::TraceSummary::Lane& lane : summary.lanes) {
    py::list spans;
    for (const base::Span& span : lane.spans) {
      spans.append(py::make_tuple(std::string(base::name_of(span.phase)), span.begin_ns / kNsPerUs,
                                  (span.end_ns - span.begin_ns) / kNsPerUs, span.busy_ns / kNsPerUs, span.count,
                                  span.bytes));
    }
    lanes.append(py::make_tuple(py::bytes(lane.name).attr("decode")("utf-8", "replace"), std::move(spans)));
  }
  out["phases"] = std::move(phases);
  out["sizes"] = sizes_of(summary);
  out["lanes"] = std::move(lanes);
  return out;
}

/// Returns {"phases": {name: [seconds of each rank]}, "sizes": {name: [(log2 of bytes, count, seconds, bytes)]}}, the
/// sizes of all ranks together. Phases that no rank has are left out. An empty trace is one without work.
py::dict trace_columns(const std::vector<std::string>& encoded) {
  std::vector<base::TraceSummary> ranks;
  base::TraceSummary all;
  run_unlocked([&]() -> base::Status {
    for (const std::string& bytes : encoded) {
      ranks.emplace_back();
      if (bytes.empty()) continue;
      BCP_ASSIGN_OR_RETURN(ranks.back(), base::decode_trace(bytes));
      for (size_t p = 0; p < base::kNumPhases; ++p) {
        all.totals[p].add(ranks.back().totals[p]);
        for (size_t c = 0; c < base::kNumSizeClasses; ++c) all.sizes[p][c].add(ranks.back().sizes[p][c]);
      }
      ranks.back().lanes.clear();
    }
    return base::Status::ok();
  });
  py::dict phases, out;
  for (size_t p = 0; p < base::kNumPhases; ++p) {
    if (all.totals[p].count == 0) continue;
    py::list column;
    for (const base::TraceSummary& rank : ranks) column.append(seconds(rank.totals[p].busy_ns));
    phases[py::str(std::string(base::name_of(static_cast<base::Phase>(p))))] = std::move(column);
  }
  out["phases"] = std::move(phases);
  out["sizes"] = sizes_of(all);
  return out;
}

}  // namespace

void bind_trace(py::module_& m) {
  py::class_<base::Trace, std::shared_ptr<base::Trace>>(m, "Trace", py::module_local())
      .def(py::init(&start_trace), py::kw_only(), py::arg("join_ns"), py::arg("spans_of_lane"), py::arg("header"))
      .def(
          "add",
          [](base::Trace& trace, const std::string& phase, int64_t begin_ns, int64_t end_ns, int64_t num_bytes,
             const std::string& lane) { trace.lane(lane)->add(phase_of(phase), begin_ns, end_ns, num_bytes); },
          py::arg("phase"), py::arg("begin_ns"), py::arg("end_ns"), py::arg("num_bytes") = 0, py::arg("lane") = "call")
      .def(
          "enter", [](base::Trace& trace, const std::string& phase) { trace.enter(phase_of(phase)); }, py::arg("phase"))
      .def("leave", &base::Trace::leave)
      .def(
          "expect",
          [](base::Trace& trace, int64_t num_bytes) {
            trace.live().bytes_expected.store(num_bytes, std::memory_order_relaxed);
          },
          py::arg("num_bytes"))
      .def_property_readonly("origin_ns", &base::Trace::origin_ns)
      .def_property_readonly("phase",
                             [](base::Trace& trace) -> std::string {
                               const int64_t phase = trace.live().phase.load(std::memory_order_relaxed);
                               return phase < 0 ? "" : std::string(base::name_of(static_cast<base::Phase>(phase)));
                             })
      .def_property_readonly("since_ns",
                             [](base::Trace& trace) { return trace.live().since_ns.load(std::memory_order_relaxed); })
      .def_property_readonly(
          "bytes_expected",
          [](base::Trace& trace) { return trace.live().bytes_expected.load(std::memory_order_relaxed); })
      .def_property_readonly("bytes_done",
                             [](base::Trace& trace) { return trace.live().bytes_done.load(std::memory_order_relaxed); })
      .def(
          "encode",
          [](base::Trace& trace, size_t max_bytes) { return py::bytes(base::encode_trace(&trace, max_bytes)); },
          py::arg("max_bytes"));
}

void bind_trace_summary(py::module_& m) {
  py::list names;
  for (size_t p = 0; p < base::kNumPhases; ++p) {
    names.append(std::string(base::name_of(static_cast<base::Phase>(p))));
  }
  m.attr("PHASES") = py::tuple(names);
  m.def("decode_trace", &decode_trace, py::arg("encoded"));
  m.def("trace_columns", &trace_columns, py::arg("encoded"));
}

}  // namespace bytecheckpoint::bindings
