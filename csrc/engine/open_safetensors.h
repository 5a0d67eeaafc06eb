// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <string>

#include "csrc/base/status.h"
#include "csrc/engine/open_checkpoint.h"
#include "csrc/format/manifest.h"

namespace bytecheckpoint::engine {

/// Makes a manifest of safetensors, as another writer's checkpoint: one chunk a tensor, and no checksums. Reads headers
/// only, of several files at a time.
///
///     path                                     what is read
///     ----                                     ------------
///     a folder with `*.safetensors.index.json` the files that it names
///     a folder with `*.safetensors`            all of them; if they are numbered `-00001-of-00003`, all must be there
///     a file `*.safetensors`, or an index      that file; the files that it names
///
/// The links of Hugging Face's cache (`snapshots/REVISION/NAME` to `../../blobs/DIGEST`) are followed: the manifest
/// then has the names and the directory of what they lead to. Other links are refused.
///
/// \param path  A local path, or a URL whose store is registered.
/// \returns kNotFound if there are none. kCorrupt for a damaged or missing file, for a name that two files have, and
/// for an index that names a tensor which its file does not have. kUnsupported for several indices, and for what
/// `format::read_safetensors_header` refuses. kStorage.
base::Result<format::Manifest> open_safetensors(const std::string& path);

/// Opens a checkpoint for reading, whatever its format: `open_checkpoint`, and if there is no commit mark
/// `open_safetensors`.
base::Result<format::Manifest> open_any_checkpoint(const std::string& path, const OpenOptions& options = {});

}  // namespace bytecheckpoint::engine
