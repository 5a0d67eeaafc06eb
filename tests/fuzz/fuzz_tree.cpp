// SPDX-License-Identifier: Apache-2.0
#include "csrc/format/tree.h"

#include "tests/fuzz/peak_memory.h"
#include "tests/fuzz/targets.h"

namespace bytecheckpoint::fuzz {

/// A value has one spelling.
std::string tree(std::string_view bytes) {
  PeakMemory memory(bytes.size(), kMaxTimesOfTree);
  const auto decoded = format::decode_tree(bytes);
  BCP_ALL_HOLD(memory.stop());
  if (!decoded.is_ok()) {
    BCP_HOLDS(decoded.status().code() == base::Code::kCorrupt);
    return {};
  }
  base::ByteWriter out;
  format::encode_tree(decoded.value(), &out);
  BCP_HOLDS(out.bytes() == bytes);
  return {};
}

}  // namespace bytecheckpoint::fuzz
