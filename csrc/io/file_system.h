// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <string>

namespace bytecheckpoint::io {

/// Is `path` on a file system that is memory of this machine (tmpfs, ramfs)? No for what cannot be asked.
bool is_in_memory(const std::string& path);

}  // namespace bytecheckpoint::io
