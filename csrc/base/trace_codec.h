// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <array>
#include <string>
#include <string_view>
#include <vector>

#include "csrc/base/status.h"
#include "csrc/base/trace.h"

namespace bytecheckpoint::base {

/// What a trace says, as it travels between ranks.
struct TraceSummary {
  struct Lane {
    std::string name;
    std::vector<Span> spans;  // begin and end are relative to the beginning of the trace, in whole microseconds
  };
  std::array<WorkTotal, kNumPhases> totals;
  std::array<std::array<WorkTotal, kNumSizeClasses>, kNumPhases> sizes;
  std::vector<Lane> lanes;
};

/// Encodes a trace in at most `max_bytes`, but the totals, sizes and names of lanes in any case. Spans are joined until
/// they fit.
std::string encode_trace(Trace* trace, size_t max_bytes);

/// \returns kCorrupt if `bytes` are not what `encode_trace` wrote: they come from other processes, and from files.
Result<TraceSummary> decode_trace(std::string_view bytes);

}  // namespace bytecheckpoint::base
