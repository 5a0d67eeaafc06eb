// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <string>
#include <string_view>

#include "csrc/format/manifest.h"

namespace bytecheckpoint::format {

/// Does the pickle of a metadata file, which stock readers go by, say what the manifest says?
/// \returns the first difference, or an empty text.
std::string compare_metadata(std::string_view pickle, const Manifest& manifest);

}  // namespace bytecheckpoint::format
