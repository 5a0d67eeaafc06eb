// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <string>
#include <string_view>

#include "csrc/format/manifest/manifest.h"

namespace bytecheckpoint::format {

/// Compares the pickle of a metadata file, which stock readers use, with the manifest, which we use.
/// \returns the first difference, as text for a message; empty if both say the same. A pickle that cannot be read is a
/// difference.
std::string compare_metadata(std::string_view pickle, const Manifest& manifest);

}  // namespace bytecheckpoint::format
