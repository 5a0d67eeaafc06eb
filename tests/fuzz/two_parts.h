// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <algorithm>
#include <string>
#include <string_view>

#include "csrc/base/bytes.h"

namespace bytecheckpoint::fuzz {

/// Two byte strings in one: the length of the first (u32), the first, the second. Any bytes form two parts.
struct TwoParts {
  std::string_view first;
  std::string_view second;

  static TwoParts of(std::string_view bytes) {
    base::ByteReader in(bytes);
    const size_t length = in.u32();
    const std::string_view first = in.view(std::min(length, in.remaining()));
    return {first, in.view(in.remaining())};
  }
  static std::string join(std::string_view first, std::string_view second) {
    base::ByteWriter out;
    out.string(first);
    out.raw(second);
    return out.take();
  }
};

}  // namespace bytecheckpoint::fuzz
