// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <string_view>
#include <utility>
#include <vector>

namespace bytecheckpoint::base {

/// Returns the numbers of `count` names, sorted by the bytes of the names, and equal names by their numbers.
///
/// The names of a state dict begin alike, and a million of them do not fit in a cache. So it sorts by the eight bytes
/// behind what all names have in common, as one number, and looks at the names themselves only where these are equal.
///
/// \param count  Below 2^32.
/// \param name_of  Returns the name of a number below `count`, as a std::string_view that stays valid.
template <class NameOf>
std::vector<uint32_t> order_by_name(size_t count, const NameOf& name_of) {
  struct Key {
    uint64_t first_bytes;
    uint32_t number;
  };
  std::vector<Key> keys(count);
  size_t shared = count == 0 ? 0 : std::string_view(name_of(0)).size();
  for (uint32_t n = 1; n < count && shared > 0; ++n) {
    const std::string_view first = name_of(0), other = name_of(n);
    const size_t most = std::min(shared, other.size());
    shared =
        static_cast<size_t>(std::mismatch(first.begin(), first.begin() + most, other.begin()).first - first.begin());
  }
  for (uint32_t n = 0; n < count; ++n) {
    const std::string_view rest = std::string_view(name_of(n)).substr(shared);
    uint64_t first_bytes = 0;
    for (size_t i = 0; i < sizeof first_bytes; ++i) {
      first_bytes = first_bytes << 8 | (i < rest.size() ? static_cast<uint8_t>(rest[i]) : 0);
    }
    keys[n] = {first_bytes, n};
  }
  std::sort(keys.begin(), keys.end(), [&](const Key& a, const Key& b) {
    if (a.first_bytes != b.first_bytes) return a.first_bytes < b.first_bytes;
    const int order = std::string_view(name_of(a.number)).compare(std::string_view(name_of(b.number)));
    return order != 0 ? order < 0 : a.number < b.number;
  });
  std::vector<uint32_t> numbers(count);
  std::transform(keys.begin(), keys.end(), numbers.begin(), [](const Key& key) { return key.number; });
  return numbers;
}

}  // namespace bytecheckpoint::base
