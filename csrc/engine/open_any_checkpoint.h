// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <string>

#include "csrc/base/status.h"
#include "csrc/engine/open_checkpoint.h"
#include "csrc/format/manifest.h"

namespace bytecheckpoint::engine {

/// Opens a checkpoint for reading, whatever its format: `open_checkpoint`, and if there is no commit mark
/// `open_safetensors`, and if there are none `open_torch_file`.
base::Result<format::Manifest> open_any_checkpoint(const std::string& path, const OpenOptions& options = {});

}  // namespace bytecheckpoint::engine
