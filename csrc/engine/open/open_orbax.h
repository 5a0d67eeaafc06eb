// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <string>

#include "csrc/base/status.h"
#include "csrc/format/manifest/manifest.h"

namespace bytecheckpoint::engine {

/// Opens a checkpoint of Orbax whose arrays are in folders of their own (`use_ocdbt=False`), in zarr 2 or 3:
///
///     _METADATA                    the names of all values, and what each is
///     params.dense.kernel/         an array: .zarray or zarr.json, and a file for each of its chunks
///     _strings.json                strings
///
/// Each chunk becomes one of the tensor; what zstd has packed is unpacked as it is read. Empty containers and None are
/// objects, as strings are.
///
/// \param path  A local path, or a URL whose store is registered: of such a folder, or locally of a step with one.
/// \returns kNotFound if there is none, and for arrays in an OCDBT database. kUnsupported for a step of several such
/// folders. kCorrupt for damage, and for a missing chunk. kStorage.
base::Result<format::Manifest> open_orbax(const std::string& path);

}  // namespace bytecheckpoint::engine
