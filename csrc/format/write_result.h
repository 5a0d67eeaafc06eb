// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <string>
#include <string_view>
#include <vector>

#include "csrc/base/status.h"
#include "csrc/format/manifest.h"

namespace bytecheckpoint::format {

/// One record that a rank wrote, found again by name and box, never by position: planners move items between ranks.
struct WrittenRecord {
  std::string fqn;
  tensor::Box box;  // no dims for bytes
  Record record;    // `file` indexes WriteResult::files
};

/// What a rank hands to the coordinator when all its bytes are on disk.
struct WriteResult {
  std::vector<FileEntry> files;
  std::vector<WrittenRecord> records;
};

/// Travels between processes of one build; not on disk.
std::string encode_write_result(const WriteResult& result);
base::Result<WriteResult> decode_write_result(std::string_view bytes);

}  // namespace bytecheckpoint::format
