// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <string>

#include "csrc/base/status.h"
#include "csrc/format/manifest/manifest.h"

namespace bytecheckpoint::engine {

/// Makes a manifest of safetensors, as another writer's checkpoint: one chunk a tensor, and no checksums. Reads headers
/// only, of several files at a time.
///
/// \param path  A file `*.safetensors`, an index of such files, or a folder with them; see `find_model_files`.
/// \returns kNotFound if there are none. kCorrupt for a damaged or missing file, for a name that two files have, and
/// for an index that names a tensor which its file does not have. kUnsupported for several indices, and for what
/// `format::read_safetensors_header` refuses. kStorage.
base::Result<format::Manifest> open_safetensors(const std::string& path);

}  // namespace bytecheckpoint::engine
