// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <string>

#include "csrc/base/status.h"
#include "csrc/engine/open/model_files.h"
#include "csrc/format/manifest/manifest.h"

namespace bytecheckpoint::engine {

/// Reads what files of torch.save hold, one behind the other.
/// \returns a manifest of all files, whose items are those of the first file, then those of the next, each with a
/// chunk, and the planner data of all: of a name that several have, those of the first. What `format::read_torch_file`
/// fails with, naming the file; kNotFound for one that does not begin as those of torch.save do. kStorage.
base::Result<format::Manifest> read_torch_files(const ModelFiles& files);

}  // namespace bytecheckpoint::engine
