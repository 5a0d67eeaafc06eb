// SPDX-License-Identifier: Apache-2.0
#include "csrc/base/crc32_table.h"

#include <cstring>

#include "csrc/base/crc32_kernels.h"

namespace bytecheckpoint::base {
namespace {

/// Returns the state after `kWords` more words. The slices make the look-ups independent of one another.
template <size_t kWords>
uint32_t step(uint32_t state, const uint8_t* p) {
  uint32_t word[kWords];
  std::memcpy(word, p, sizeof word);
  word[0] ^= state;
  state = 0;
  for (size_t w = 0; w < kWords; ++w) state ^= crc32_look_up(word[w], 4 * (kWords - 1 - w));
  return state;
}

}  // namespace

uint32_t crc32_table(uint32_t crc, const void* bytes, size_t size) {
  const auto* p = static_cast<const uint8_t*>(bytes);
  uint32_t state = ~crc;
  for (; size >= 16; size -= 16, p += 16) state = step<4>(state, p);
  if (size & 8) {
    state = step<2>(state, p);
    p += 8;
  }
  if (size & 4) {
    state = step<1>(state, p);
    p += 4;
  }
  for (size &= 3; size != 0; --size) state = (state >> 8) ^ kCrc32Tables.slice[0][(state ^ *p++) & 0xFF];
  return ~state;
}

}  // namespace bytecheckpoint::base
