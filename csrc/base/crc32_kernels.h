// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "csrc/base/crc32.h"

// What the kernels of crc32.h share: arithmetic modulo the polynomial, at compile time.

namespace bytecheckpoint::base::crc32_internal {

inline constexpr uint32_t kPolynomial = 0xEDB88320u;

/// a * b modulo the polynomial, all three reflected: bit 31 is x^0. Without branches, as the bits are random.
constexpr uint32_t multiply(uint32_t a, uint32_t b) {
  uint32_t product = 0;
  for (int bit = 31; bit >= 0; --bit) {
    product ^= b & (0u - ((a >> bit) & 1));
    b = (b >> 1) ^ (kPolynomial & (0u - (b & 1)));
  }
  return product;
}

/// x^exponent modulo the polynomial, reflected.
constexpr uint32_t power_of_x(uint64_t exponent) {
  uint32_t result = 0x80000000u;  // x^0
  uint32_t square = 0x40000000u;  // x^1
  for (; exponent != 0; exponent >>= 1) {
    if (exponent & 1) result = multiply(result, square);
    square = multiply(square, square);
  }
  return result;
}

/// Sixteen bytes a step from tables; runs anywhere.
/// Source: Kounavis & Berry, "Novel Table Lookup-Based Algorithms for High-Performance CRC Generation", IEEE ToC 2008.
uint32_t update_table(uint32_t state, const uint8_t* bytes, size_t size);

/// Append what this CPU can run; nothing on other architectures.
void append_x86_kernels(std::vector<Crc32Kernel>* kernels);
void append_arm_kernels(std::vector<Crc32Kernel>* kernels);

}  // namespace bytecheckpoint::base::crc32_internal
