// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <string>

#include "csrc/base/status.h"
#include "csrc/format/manifest.h"

namespace bytecheckpoint::engine {

/// Does the pickle in the metadata file at `path`, which stock readers go by, say what the manifest says?
/// \returns the first difference, or an empty text; kStorage, kCorrupt.
base::Result<std::string> compare_metadata(const std::string& path, const format::Manifest& manifest);

}  // namespace bytecheckpoint::engine
