// SPDX-License-Identifier: Apache-2.0
#include "csrc/planner/wanted_blocks.h"
#include "tests/fuzz/peak_memory.h"
#include "tests/fuzz/targets.h"

namespace bytecheckpoint::fuzz {

/// Decoded ranges ascend, and encode to the same bytes. No bytes decode to no ranges.
std::string block_ranges(std::string_view bytes) {
  constexpr int64_t kBlockBytes = 256 << 10;
  PeakMemory memory(bytes.size());
  const auto ranges = planner::decode_ranges(bytes, kBlockBytes);
  BCP_ALL_HOLD(memory.stop());
  if (!ranges.is_ok()) {
    BCP_HOLDS(ranges.status().code() == base::Code::kCorrupt);
    return {};
  }
  const planner::BlockRange* before = nullptr;
  for (const planner::BlockRange& range : ranges.value()) {
    BCP_HOLDS(range.begin >= 0 && range.begin < range.end);
    BCP_HOLDS(range.begin % kBlockBytes == 0 && range.end % kBlockBytes == 0);
    BCP_HOLDS(before == nullptr || before->file < range.file ||
              (before->file == range.file && before->end < range.begin));
    before = &range;
  }
  if (!bytes.empty()) BCP_HOLDS(planner::encode_ranges(ranges.value(), kBlockBytes) == bytes);
  return {};
}

}  // namespace bytecheckpoint::fuzz
