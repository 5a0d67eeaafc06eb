// SPDX-License-Identifier: Apache-2.0
#include "csrc/format/torch/builtin_archive.h"

#include "tests/fuzz/peak_memory.h"
#include "tests/fuzz/targets.h"

namespace bytecheckpoint::fuzz {

/// A decoded value survives encoding into an archive and decoding.
std::string builtin_archive(std::string_view bytes) {
  PeakMemory memory(bytes.size());
  const auto decoded = format::decode_builtin_archive(bytes);
  BCP_ALL_HOLD(memory.stop());
  if (!decoded.is_ok()) {
    BCP_HOLDS(decoded.status().code() == base::Code::kCorrupt);
    return {};
  }
  if (!decoded.value().has_value()) return {};
  const format::Tree& tree = *decoded.value();
  const std::string archive = format::encode_builtin_archive(tree);
  const auto again = format::decode_builtin_archive(archive);
  BCP_HOLDS(again.is_ok() && again.value().has_value() && *again.value() == tree);
  return {};
}

}  // namespace bytecheckpoint::fuzz
