// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <string>
#include <string_view>
#include <tuple>
#include <vector>

#include "csrc/base/status.h"
#include "csrc/format/manifest/manifest.h"

namespace bytecheckpoint::engine {

/// The checksums that other writers stored of stretches of their files, such as the entries of an archive, computed as
/// the bytes come, in any order. Files of ours need none: their blocks have checksums. Not thread-safe.
///
///     a load         add, ... -> check, at the end of its run: only what it reads whole is added
///     a conversion   add, ... -> check, ... of each run; its processes `take` and `merge` what is begun -> finish
class StoredChecksums {
 public:
  /// Adds bytes [begin, end) of a file, which are in the stretch.
  void add(const format::StoredCrc& stretch, int64_t begin, int64_t end, const uint8_t* bytes);
  /// Compares the stretches of which all bytes were added. \returns kCorrupt.
  /// \param manifest  Of the checkpoint in `directory`.
  base::Status check(const format::Manifest& manifest, const std::string& directory);
  /// Compares the others, too: reads what is missing of them, unless it is more than was added, and many bytes.
  /// \param progress  Called with the bytes that were read; false ends it. \returns kCorrupt; kChanged; kStorage;
  /// kCancelled.
  base::Status finish(const format::Manifest& manifest, const std::string& directory,
                      const std::function<bool(int64_t)>& progress);

  /// Returns what was added of stretches that are not complete, for `merge`, and forgets it.
  std::string take();
  /// \returns kCorrupt for bytes that `take` has not made.
  base::Status merge(std::string_view taken);
  void clear() {
    touched_.clear();
    stretches_.clear();
  }

 private:
  /// Bytes of a file, of which the checksum is known.
  struct Part {
    int64_t begin, end;
    uint32_t crc;
  };
  struct Stretch {
    format::StoredCrc stored;
    std::vector<Part> parts;
    int64_t bytes = 0;  // of the parts
    bool is_touched = false;
    bool is_compared = false;
  };

  Stretch& find(const format::StoredCrc& stored);
  /// Puts parts in order, and leaves out what overlaps. \returns the number of bytes that no part has.
  static int64_t sort(Stretch* stretch);
  static base::Status compare(Stretch* stretch, const format::Manifest& manifest, const std::string& directory);

  std::map<std::tuple<uint32_t, int64_t, int64_t>, Stretch> stretches_;  // by file, offset and bytes
  std::vector<Stretch*> touched_;                                        // since the last `check`
};

}  // namespace bytecheckpoint::engine
