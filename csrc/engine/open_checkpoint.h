// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <string>
#include <string_view>

#include "csrc/base/status.h"
#include "csrc/format/manifest.h"

namespace bytecheckpoint::engine {

inline constexpr std::string_view kMetadataName = ".metadata";

/// Reads and checks the manifest of the checkpoint in `directory`.
///
/// \param name          `.metadata`, or the commit mark of one rank.
/// \param check_pickle  Also check the part that only stock readers use.
/// \returns kNotFound without such a file; kCorrupt for one of ours that is damaged; kUnsupported for one that is not
/// ours; kVersion; kStorage.
base::Result<format::Manifest> open_checkpoint(const std::string& directory, std::string_view name = kMetadataName,
                                               bool check_pickle = false);

}  // namespace bytecheckpoint::engine
