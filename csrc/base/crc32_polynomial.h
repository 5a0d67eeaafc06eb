// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>

namespace bytecheckpoint::base {

// Arithmetic of polynomials over GF(2) modulo the polynomial P of the CRC. It computes constants at compile time; it
// works bit by bit and is far too slow for data.
//
// All numbers are reflected, like the bits of a stream: the lowest bit is the highest power of x. A 32-bit number has
// x^0 in bit 31, a 64-bit number has it in bit 63.

/// P(x) without its term x^32.
inline constexpr uint32_t kCrc32Polynomial = 0xEDB88320u;

/// Returns a * x mod P.
constexpr uint32_t crc32_times_x(uint32_t a) {
  return (a & 1) ? (a >> 1) ^ kCrc32Polynomial : a >> 1;
}

/// Returns a * b mod P.
constexpr uint32_t crc32_times(uint32_t a, uint32_t b) {
  uint32_t product = 0;
  for (uint32_t bit = 0x80000000u; bit != 0; bit >>= 1) {
    if (a & bit) product ^= b;
    b = crc32_times_x(b);
  }
  return product;
}

/// Returns x^n mod P.
constexpr uint32_t crc32_power_of_x(uint64_t n) {
  uint32_t power = 0x80000000u;   // x^0
  uint32_t square = 0x40000000u;  // x^(2^k) for bit k of n
  for (; n != 0; n >>= 1) {
    if (n & 1) power = crc32_times(power, square);
    square = crc32_times(square, square);
  }
  return power;
}

/// P is primitive, so the powers of x repeat after 2^32 - 1, and exponents may be reduced modulo 2^32 - 1.
static_assert(crc32_power_of_x(uint64_t{1} << 32) == crc32_power_of_x(1));

}  // namespace bytecheckpoint::base
