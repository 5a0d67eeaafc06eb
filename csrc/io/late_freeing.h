// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <string>

#include "csrc/base/status.h"

namespace bytecheckpoint::io {

/// Removes a name as `remove_file` does, but returns before the space of the file is free, where that can be put off.
///
/// Freeing the blocks of a large file takes long: ext4 needs 0.18 s a GB here, as long as half of a save. But nothing
/// is freed while somebody has the file mapped. So one page of the file is mapped, the name removed, and a thread of
/// the process unmaps the page:
///
///     caller    map -> unlink -> return
///     thread                        unmap: the file system frees the blocks
///
/// A mapping that is not for forked children, rather than a descriptor: a child would have a copy of that, and keep the
/// space for as long as it lives. If the process dies, the system unmaps; if power is lost, the file system finds the
/// file without a name when it is mounted again.
///
/// Only on local file systems that keep removed files without a name. NFS would rename the file instead. Elsewhere, for
/// small files and for those with other hard links, this is `remove_file`. Thread-safe.
base::Status remove_and_free_later(const std::string& path);

/// Waits until the space of all files that were removed before is free. In a forked child there is nothing to wait for.
void wait_until_freed();

}  // namespace bytecheckpoint::io
