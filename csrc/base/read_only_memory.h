// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>
#include <cstdint>
#include <string_view>
#include <vector>

namespace bytecheckpoint::base {

/// Memory of this process that may be read but not written to, such as a file that is mapped for reading only.
class ReadOnlyMemory {
 public:
  /// Returns what the kernel lists at the moment; nothing where it has no list. Takes about a millisecond.
  static ReadOnlyMemory of_process();
  /// \param maps  Text of /proc/self/maps. Lines that are not as they should be are left out.
  explicit ReadOnlyMemory(std::string_view maps);

  /// Returns whether any of `bytes` bytes from `begin` on is in such memory.
  bool has(const void* begin, int64_t bytes) const;

 private:
  struct Range {
    uintptr_t begin, end;
  };
  std::vector<Range> ranges_;  // ascending
};

}  // namespace bytecheckpoint::base
