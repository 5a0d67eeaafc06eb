// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <string>

#include "csrc/base/status.h"
#include "csrc/engine/open/open_checkpoint.h"
#include "csrc/format/manifest/manifest.h"

namespace bytecheckpoint::engine {

/// Opens a checkpoint for reading, whatever its format: `open_checkpoint`, and if there is no commit mark
/// `open_safetensors`, `open_torch_file`, `open_deepspeed` and `open_orbax`, the first that finds something.
base::Result<format::Manifest> open_any_checkpoint(const std::string& path, const OpenOptions& options = {});

/// Finds out, after a read has failed, whether somebody has removed the checkpoint meanwhile, such as a prune in
/// another process: it removes the commit mark first.
/// \param what  What was being done. \param failure  Its failure.
/// \returns kNotFound if no checkpoint is there any more; else `failure`.
base::Status explain_removed(const char* what, const std::string& path, Scope scope, base::Status failure);

}  // namespace bytecheckpoint::engine
