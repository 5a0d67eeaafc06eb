// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <string>

#include "csrc/base/status.h"
#include "csrc/format/manifest/manifest.h"

namespace bytecheckpoint::engine {

/// Makes a manifest of files of torch.save, as another writer's checkpoint; see `format::read_torch_file`. Elements are
/// not read. Where a file has checksums, they are in the manifest.
///
///     path                                      what is read
///     ----                                      ------------
///     a file that begins as torch.save's do     that file, whatever its name; below a URL, its name must end with
///                                               .pt, .pth, .bin or .ckpt
///     a folder with `pytorch_model*.bin`        these files, or those that their index names, as `find_model_files`
///                                               finds them
///     a folder with the files of ranks          the parts of DTensors that each rank had, joined; see
///                                               `find_rank_files`
///
/// \returns kNotFound if there are none. What `format::read_torch_file` and `find_model_files` fail with, naming the
/// file. kStorage.
base::Result<format::Manifest> open_torch_file(const std::string& path);

}  // namespace bytecheckpoint::engine
