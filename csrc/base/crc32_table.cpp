// SPDX-License-Identifier: Apache-2.0
#include <cstring>

#include "csrc/base/crc32_kernels.h"

namespace bytecheckpoint::base::crc32_internal {
namespace {

constexpr size_t kSlices = 16;

struct Tables {
  // slice[0] is the byte table; slice[k][b] is the CRC of byte b followed by k zero bytes.
  uint32_t slice[kSlices][256];
};

constexpr Tables make_tables() {
  Tables t{};
  for (uint32_t byte = 0; byte < 256; ++byte) {
    uint32_t crc = byte;
    for (int bit = 0; bit < 8; ++bit) crc = (crc & 1) ? (crc >> 1) ^ kPolynomial : crc >> 1;
    t.slice[0][byte] = crc;
  }
  for (size_t k = 1; k < kSlices; ++k) {
    for (uint32_t byte = 0; byte < 256; ++byte) {
      const uint32_t crc = t.slice[k - 1][byte];
      t.slice[k][byte] = (crc >> 8) ^ t.slice[0][crc & 0xFF];
    }
  }
  return t;
}

constexpr Tables kTables = make_tables();

}  // namespace

uint32_t update_table(uint32_t state, const uint8_t* bytes, size_t size) {
  const auto& slice = kTables.slice;
  for (; size >= kSlices; size -= kSlices, bytes += kSlices) {
    uint32_t word[4];
    std::memcpy(word, bytes, sizeof word);
    word[0] ^= state;
    state = 0;
    for (int w = 0; w < 4; ++w) {
      for (int b = 0; b < 4; ++b) state ^= slice[15 - 4 * w - b][(word[w] >> (8 * b)) & 0xFF];
    }
  }
  for (; size != 0; --size) state = (state >> 8) ^ slice[0][(state ^ *bytes++) & 0xFF];
  return state;
}

}  // namespace bytecheckpoint::base::crc32_internal
