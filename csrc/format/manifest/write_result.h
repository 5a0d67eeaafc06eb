// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <string>
#include <string_view>
#include <vector>

#include "csrc/base/status.h"
#include "csrc/format/manifest/manifest.h"

namespace bytecheckpoint::format {

/// One record that a rank wrote. The coordinator finds it by name and box, never by position, because planners move
/// items between ranks.
struct WrittenRecord {
  std::string fqn;
  tensor::Box box;  // no dims for an object
  Record record;    // `file` is an index into WriteResult::files
};

/// What a rank sends to the coordinator once all its bytes are on disk.
struct WriteResult {
  std::vector<FileEntry> files;
  std::vector<WrittenRecord> records;
};

/// Encode a result to be sent to another process of the same build, and decode it. It is never on disk. \returns
/// kCorrupt for damage.
std::string encode_write_result(const WriteResult& result);
base::Result<WriteResult> decode_write_result(std::string_view bytes);

}  // namespace bytecheckpoint::format
