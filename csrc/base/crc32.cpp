// SPDX-License-Identifier: Apache-2.0
#include "csrc/base/crc32.h"

#include "csrc/base/crc32_kernels.h"
#include "csrc/base/crc32_polynomial.h"
#include "csrc/base/crc32_table.h"

namespace bytecheckpoint::base {
namespace {

/// A local static and not a global, so that code that needs a CRC while globals are constructed gets one.
const Crc32Kernel& chosen_kernel() {
  static const Crc32Kernel kernel = crc32_kernels().front();
  return kernel;
}

struct Powers {
  static constexpr int kDigits = 4;

  // shift[k][d] = x^(8 * d * 256^k) mod P: the factor by which d * 256^k more bytes multiply a CRC.
  uint32_t shift[kDigits][256];
};

constexpr Powers make_powers() {
  Powers powers{};
  uint32_t unit = crc32_power_of_x(8);
  for (auto& digit : powers.shift) {
    uint32_t power = crc32_power_of_x(0);
    for (uint32_t& entry : digit) {
      entry = power;
      power = crc32_times(power, unit);
    }
    unit = power;
  }
  return powers;
}

constexpr Powers kPowers = make_powers();

/// Returns the carry-less product of a and b, which has 63 bits.
///
/// Multiplies every fourth bit of a by every fourth bit of b, as integers. Then at most 8 ones meet at one bit, and the
/// three bits above it, which no other sum uses, can hold their number.
uint64_t multiply_carryless(uint32_t a, uint32_t b) {
  constexpr uint64_t kEveryFourth = 0x1111111111111111u;
  uint64_t product = 0;
  for (int k = 0; k < 4; ++k) {
    uint64_t sums = 0;
    for (int i = 0; i < 4; ++i) sums ^= (a & (kEveryFourth << i)) * (b & (kEveryFourth << ((k - i) & 3)));
    product |= sums & (kEveryFourth << k);
  }
  return product;
}

/// Returns a * b mod P. The 63 bits of the product are moved to the top of 64, where x^0 belongs. Then the high powers
/// of x, which are the low half, are reduced.
uint32_t multiply(uint32_t a, uint32_t b) {
  const uint64_t product = multiply_carryless(a, b) << 1;
  return static_cast<uint32_t>(product >> 32) ^ crc32_look_up(static_cast<uint32_t>(product), 0);
}

}  // namespace

std::vector<Crc32Kernel> crc32_kernels() {
  std::vector<Crc32Kernel> kernels;
  add_crc32_x86_kernels(&kernels);
  add_crc32_arm_kernels(&kernels);
  kernels.push_back({"table", crc32_table});
  return kernels;
}

const char* crc32_kernel_name() {
  return chosen_kernel().name;
}

uint32_t crc32(uint32_t crc, const void* bytes, size_t size) {
  return chosen_kernel().update(crc, bytes, size);
}

uint32_t crc32_combine(uint32_t crc_a, uint32_t crc_b, uint64_t length_b) {
  // The powers of x repeat after 2^32 - 1, so 2^32 more bytes count as one. The second step adds the carry of the first
  // sum.
  uint64_t length = (length_b >> 32) + (length_b & 0xFFFFFFFFu);
  length = (length >> 32) + (length & 0xFFFFFFFFu);
  uint32_t shifted = crc_a;
  for (const auto& shift : kPowers.shift) {
    if ((length & 0xFF) != 0) shifted = multiply(shifted, shift[length & 0xFF]);
    length >>= 8;
  }
  return shifted ^ crc_b;
}

uint32_t crc32_without_end(uint32_t crc_a_b, uint32_t crc_b, uint64_t length_b) {
  // So many bytes more make the shift by b a whole round of the powers of x.
  constexpr uint64_t kRound = (uint64_t{1} << 32) - 1;
  return crc32_combine(crc_a_b ^ crc_b, 0, kRound - length_b % kRound);
}

}  // namespace bytecheckpoint::base
