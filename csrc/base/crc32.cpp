// SPDX-License-Identifier: Apache-2.0
#include "csrc/base/crc32.h"

#include <array>
#include <cstring>

namespace bytecheckpoint::base {
namespace {

constexpr uint32_t kPolynomial = 0xEDB88320u;
constexpr size_t kSlices = 16;

struct Tables {
  // slice[0] is the byte table; slice[k][b] is the CRC of byte b followed by k zero bytes.
  uint32_t slice[kSlices][256];
  // power[k] = x^(2^k) modulo the polynomial, reflected: bit 31 is x^0.
  uint32_t power[64];
};

/// a * b modulo the polynomial, both reflected.
constexpr uint32_t multiply(uint32_t a, uint32_t b) {
  uint32_t product = 0;
  for (uint32_t bit = 0x80000000u; bit != 0; bit >>= 1) {
    if (a & bit) product ^= b;
    b = (b & 1) ? (b >> 1) ^ kPolynomial : b >> 1;
  }
  return product;
}

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
  t.power[0] = 0x40000000u;  // x^1
  for (int k = 1; k < 64; ++k) t.power[k] = multiply(t.power[k - 1], t.power[k - 1]);
  return t;
}

constexpr Tables kTables = make_tables();

}  // namespace

uint32_t crc32(uint32_t crc, const void* bytes, size_t size) {
  const auto* p = static_cast<const uint8_t*>(bytes);
  const auto& slice = kTables.slice;
  uint32_t state = ~crc;
  for (; size >= kSlices; size -= kSlices, p += kSlices) {
    uint32_t word[4];
    std::memcpy(word, p, sizeof word);
    word[0] ^= state;
    state = 0;
    for (int w = 0; w < 4; ++w) {
      for (int b = 0; b < 4; ++b) state ^= slice[15 - 4 * w - b][(word[w] >> (8 * b)) & 0xFF];
    }
  }
  for (; size != 0; --size) state = (state >> 8) ^ slice[0][(state ^ *p++) & 0xFF];
  return ~state;
}

uint32_t crc32_combine(uint32_t crc_a, uint32_t crc_b, uint64_t length_b) {
  // x^(8n) is the product of x^(2^k) over the set bits k of 8n; 8n never needs bit 64 because length_b is a file
  // length.
  uint32_t shifted = crc_a;
  int k = 3;
  for (uint64_t n = length_b; n != 0; n >>= 1, ++k) {
    if (n & 1) shifted = multiply(kTables.power[k & 63], shifted);
  }
  return shifted ^ crc_b;
}

}  // namespace bytecheckpoint::base
