// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <string>
#include <string_view>

#include "csrc/format/archive/archive_reader.h"

namespace bytecheckpoint::fuzz {

/// Reads an archive in memory. Reads outside of it are errors that the sanitizers report.
inline format::ReadBytes in_memory(std::string_view bytes) {
  return [bytes](int64_t offset, int64_t size) -> base::Result<std::string> {
    return std::string(bytes.data() + offset, static_cast<size_t>(size));
  };
}

}  // namespace bytecheckpoint::fuzz
