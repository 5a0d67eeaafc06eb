// SPDX-License-Identifier: Apache-2.0
#include "csrc/format/dcp/foreign_metadata.h"

#include "csrc/format/dcp/compare_metadata.h"
#include "tests/fuzz/peak_memory.h"
#include "tests/fuzz/targets.h"
#include "tests/fuzz/valid_manifest.h"

namespace bytecheckpoint::fuzz {
namespace {

/// Checks that the name is of a file in the directory or below it.
std::string check_name(const std::string& name) {
  BCP_HOLDS(!name.empty() && name[0] != '/' && name.find('\0') == name.npos);
  BCP_HOLDS(("/" + name + "/").find("/../") == name.npos);
  return {};
}

}  // namespace

/// What is read is valid, its files are in the directory, and it matches the pickle.
std::string foreign_metadata(std::string_view bytes) {
  PeakMemory memory(bytes.size());
  const auto read = format::read_foreign_metadata(bytes);
  BCP_ALL_HOLD(memory.stop());
  if (!read.is_ok()) {
    const base::Code code = read.status().code();
    BCP_HOLDS(code == base::Code::kCorrupt || code == base::Code::kUnsupported);
    return {};
  }
  BCP_ALL_HOLD(check_manifest(read.value()));
  bool has_all = true;
  for (const format::FileEntry& file : read.value().files) BCP_ALL_HOLD(check_name(file.name));
  for (const format::Item& item : read.value().items) {
    for (const format::Chunk& chunk : item.chunks) has_all &= chunk.record.kind != format::RecordKind::kAbsent;
  }
  BCP_HOLDS(!has_all || format::compare_metadata(bytes, read.value()).empty());
  return {};
}

}  // namespace bytecheckpoint::fuzz
