// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <string>

#include "csrc/base/status.h"

namespace bytecheckpoint::engine {

/// Compares all bytes of a data file with the checksums in the file itself, by several threads. For one that has come
/// from another machine, and that no manifest names yet.
/// \param fd    Stays the caller's; it is read at positions of its own. \param path  For messages.
/// \returns kCorrupt, also if it is no data file of ours. kStorage.
base::Status check_data_file(int fd, const std::string& path, int num_threads);

}  // namespace bytecheckpoint::engine
