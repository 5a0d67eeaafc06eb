// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <string>

#include "csrc/base/status.h"

namespace bytecheckpoint::base {

/// What tells one content of a file from the next one under the same name, without reading it. Another writer's files
/// have no id of their own, so a reader that comes back to one compares this.
///
/// The device is no part of it: its number may be another on another machine, and after a restart.
struct FileVersion {
  int64_t bytes = -1;    // -1: nobody has looked
  int64_t mtime_ns = 0;  // 0 for an object
  uint64_t inode = 0;    // 0 for an object, and where inode numbers do not last
  std::string etag;      // of an object; empty if the store has none

  bool is_known() const { return bytes >= 0; }
  /// Whether a file that now is `now` has not changed. Inodes count if both are known.
  bool is_same(const FileVersion& now) const {
    const bool same_inode = inode == now.inode || inode == 0 || now.inode == 0;
    return bytes == now.bytes && mtime_ns == now.mtime_ns && etag == now.etag && same_inode;
  }
  std::string to_text() const {
    return etag.empty() ? text(bytes, " bytes of time ", mtime_ns, " ns, inode ", inode)
                        : text(bytes, " bytes, ETag ", etag);
  }
};

}  // namespace bytecheckpoint::base
