// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <string>

#include "csrc/base/status.h"

namespace bytecheckpoint::io {

/// Is `path` on a file system that is memory of this machine (tmpfs, ramfs)? No for what cannot be asked.
bool is_in_memory(const std::string& path);

/// kStorage with ENOSPC if the file system of `path` says that it has less than `bytes` left for this user. One that
/// says nothing has room.
base::Status check_room(const std::string& path, int64_t bytes);

}  // namespace bytecheckpoint::io
