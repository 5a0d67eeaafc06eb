// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <string>

namespace bytecheckpoint::io {

/// Is `path` on a file system whose disks, or memory, are this machine's own? No for anything that is not known to be:
/// networks, FUSE, and what cannot be asked.
bool is_on_local_file_system(const std::string& path);

}  // namespace bytecheckpoint::io
