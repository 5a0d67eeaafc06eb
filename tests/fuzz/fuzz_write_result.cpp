// SPDX-License-Identifier: Apache-2.0
#include "csrc/format/manifest/write_result.h"

#include "tests/fuzz/peak_memory.h"
#include "tests/fuzz/targets.h"

namespace bytecheckpoint::fuzz {

/// What is read encodes to the same bytes, and every record is in a listed file.
std::string write_result(std::string_view bytes) {
  PeakMemory memory(bytes.size());
  const auto decoded = format::decode_write_result(bytes);
  BCP_ALL_HOLD(memory.stop());
  if (!decoded.is_ok()) {
    BCP_HOLDS(decoded.status().code() == base::Code::kCorrupt);
    return {};
  }
  for (const format::FileEntry& file : decoded.value().files) BCP_HOLDS(format::is_data_file_name(file.name));
  for (const format::WrittenRecord& written : decoded.value().records) {
    BCP_HOLDS(written.record.file < decoded.value().files.size());
    BCP_HOLDS(written.box.offsets.size() == written.box.sizes.size());
  }
  BCP_HOLDS(format::encode_write_result(decoded.value()) == bytes);
  return {};
}

}  // namespace bytecheckpoint::fuzz
