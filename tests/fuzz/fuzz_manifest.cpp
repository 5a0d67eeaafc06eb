// SPDX-License-Identifier: Apache-2.0
#include "csrc/format/manifest/manifest.h"

#include "tests/fuzz/peak_memory.h"
#include "tests/fuzz/targets.h"
#include "tests/fuzz/valid_manifest.h"

namespace bytecheckpoint::fuzz {

/// A decoded manifest is valid, and survives encoding and decoding. The bytes may differ, because sections may be
/// anywhere.
std::string manifest(std::string_view bytes) {
  PeakMemory memory(bytes.size());
  const auto decoded = format::decode_manifest(bytes);
  BCP_ALL_HOLD(memory.stop());
  if (!decoded.is_ok()) {
    const base::Code code = decoded.status().code();
    BCP_HOLDS(code == base::Code::kCorrupt || code == base::Code::kVersion);
    return {};
  }
  BCP_ALL_HOLD(check_manifest(decoded.value()));
  for (const format::FileEntry& file : decoded.value().files) BCP_HOLDS(format::is_data_file_name(file.name));
  const std::string once = format::encode_manifest(decoded.value());
  const auto again = format::decode_manifest(once);
  BCP_HOLDS(again.is_ok() && format::encode_manifest(again.value()) == once);
  return {};
}

}  // namespace bytecheckpoint::fuzz
