// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>

namespace bytecheckpoint::base {

/// The stretch of a file that zstd has packed, of which whoever reads the file wants what it unpacks to.
struct Packing {
  int64_t offset = 0;
  int64_t bytes = 0;
  int64_t unpacked_bytes = 0;  // 0: nothing is packed

  bool is_packed() const { return unpacked_bytes > 0; }
  bool operator==(const Packing& other) const {
    return offset == other.offset && bytes == other.bytes && unpacked_bytes == other.unpacked_bytes;
  }
};

}  // namespace bytecheckpoint::base
