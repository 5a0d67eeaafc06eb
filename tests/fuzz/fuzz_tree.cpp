// SPDX-License-Identifier: Apache-2.0
#include "csrc/format/tree.h"

#include "tests/cpp/make_tree.h"
#include "tests/fuzz/peak_memory.h"
#include "tests/fuzz/targets.h"

namespace bytecheckpoint::fuzz {

/// A value has exactly one encoding.
std::string tree(std::string_view bytes) {
  PeakMemory memory(bytes.size());
  const auto decoded = format::decode_tree(bytes);
  BCP_ALL_HOLD(memory.stop());
  if (!decoded.is_ok()) {
    BCP_HOLDS(decoded.status().code() == base::Code::kCorrupt);
    return {};
  }
  BCP_HOLDS(test::written_anew(decoded.value()) == bytes);
  return {};
}

}  // namespace bytecheckpoint::fuzz
