// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>
#include <cstdint>

#include "csrc/base/crc32_polynomial.h"

namespace bytecheckpoint::base {

/// What one byte contributes to the CRC state when a known number of bytes follows it.
struct Crc32Tables {
  static constexpr size_t kSlices = 16;

  /// slice[0] is the byte table; slice[k][b] is the state after byte b and k zero bytes, from state 0.
  uint32_t slice[kSlices][256];
};

constexpr Crc32Tables make_crc32_tables() {
  Crc32Tables t{};
  for (uint32_t byte = 0; byte < 256; ++byte) {
    uint32_t state = byte;
    for (int bit = 0; bit < 8; ++bit) state = crc32_times_x(state);
    t.slice[0][byte] = state;
  }
  for (size_t k = 1; k < Crc32Tables::kSlices; ++k) {
    for (uint32_t byte = 0; byte < 256; ++byte) {
      const uint32_t state = t.slice[k - 1][byte];
      t.slice[k][byte] = (state >> 8) ^ t.slice[0][state & 0xFF];
    }
  }
  return t;
}

inline constexpr Crc32Tables kCrc32Tables = make_crc32_tables();

/// Returns the CRC state after four zero bytes and `following` more, from `state`: state * x^(8 * (4 + following)) mod
/// P. Costs four look-ups.
/// \param following  At most kSlices - 4.
inline uint32_t crc32_look_up(uint32_t state, size_t following) {
  const auto& slice = kCrc32Tables.slice;
  return slice[following + 3][state & 0xFF] ^ slice[following + 2][(state >> 8) & 0xFF] ^
         slice[following + 1][(state >> 16) & 0xFF] ^ slice[following][state >> 24];
}

}  // namespace bytecheckpoint::base
