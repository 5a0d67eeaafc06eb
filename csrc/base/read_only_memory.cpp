// SPDX-License-Identifier: Apache-2.0
#include "csrc/base/read_only_memory.h"

#include <algorithm>
#include <charconv>
#include <fstream>
#include <sstream>

namespace bytecheckpoint::base {

ReadOnlyMemory::ReadOnlyMemory(std::string_view maps) : ranges_(std::in_place) {
  // A line is `7f0000000000-7f0000001000 r--p 00000000 08:01 1234 /path`, in ascending order.
  while (!maps.empty()) {
    const std::string_view line = maps.substr(0, maps.find('\n'));
    maps.remove_prefix(std::min(line.size() + 1, maps.size()));
    const char* const end_of_line = line.data() + line.size();
    Range range{};
    const auto begin = std::from_chars(line.data(), end_of_line, range.begin, 16);
    if (begin.ec != std::errc() || begin.ptr == end_of_line || *begin.ptr != '-') continue;
    const auto end = std::from_chars(begin.ptr + 1, end_of_line, range.end, 16);
    if (end.ec != std::errc() || std::string_view(end.ptr, end_of_line - end.ptr).substr(0, 3) != " r-") continue;
    ranges_->push_back(range);
  }
}

bool ReadOnlyMemory::has(const void* begin, int64_t bytes) {
  if (!ranges_.has_value()) {
    std::ostringstream maps;
    maps << std::ifstream("/proc/self/maps").rdbuf();
    *this = ReadOnlyMemory(maps.str());
  }
  const auto at = reinterpret_cast<uintptr_t>(begin);
  const auto next = std::upper_bound(ranges_->begin(), ranges_->end(), at,
                                     [](uintptr_t a, const Range& range) { return a < range.end; });
  return bytes > 0 && next != ranges_->end() && next->begin < at + static_cast<uintptr_t>(bytes);
}

}  // namespace bytecheckpoint::base
