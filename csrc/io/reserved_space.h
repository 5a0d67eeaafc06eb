// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <atomic>
#include <cstdint>
#include <utility>

#include "csrc/base/status.h"
#include "csrc/io/descriptor.h"

namespace bytecheckpoint::io {

/// The disk space that one new file has reserved, and how long the file is where nothing could be reserved.
///
/// Any thread may call `note_written`.
class ReservedSpace {
 public:
  ReservedSpace() = default;
  ReservedSpace(ReservedSpace&& other) noexcept { *this = std::move(other); }
  ReservedSpace& operator=(ReservedSpace&& other) noexcept {
    end_ = other.end_.load();
    return *this;
  }

  /// Reserves disk space behind the end, without changing the size. File systems that cannot reserve are only asked
  /// whether they have the space now. \returns kStorage with ENOSPC or EDQUOT if there is none.
  base::Status reserve(const Descriptor& file, int64_t bytes);
  /// Sets the size, and gives back space that was reserved behind it.
  base::Status truncate(const Descriptor& file, int64_t bytes);
  /// Notes that bytes before `end` were written.
  void note_written(int64_t end);

 private:
  std::atomic<int64_t> end_{-1};  // of what was written, of a file without reserved space; -1 if that is not known
};

}  // namespace bytecheckpoint::io
