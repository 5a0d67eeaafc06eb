// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <string_view>
#include <vector>

namespace bytecheckpoint::base {

/// Memory of this process that may be read but not written to, such as a file that is mapped for reading only.
class ReadOnlyMemory {
 public:
  /// What the kernel lists when `has` is first called; nothing where it has no list. Reading it takes about a
  /// millisecond.
  ReadOnlyMemory() = default;
  /// \param maps  Text of /proc/self/maps. Lines that are not as they should be are left out.
  explicit ReadOnlyMemory(std::string_view maps);

  /// Returns whether any of `bytes` bytes from `begin` on is in such memory.
  bool has(const void* begin, int64_t bytes);

 private:
  struct Range {
    uintptr_t begin, end;
  };
  std::optional<std::vector<Range>> ranges_;  // ascending
};

}  // namespace bytecheckpoint::base
