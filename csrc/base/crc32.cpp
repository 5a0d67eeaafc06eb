// SPDX-License-Identifier: Apache-2.0
#include "csrc/base/crc32.h"

#include <array>

#include "csrc/base/crc32_kernels.h"

namespace bytecheckpoint::base {
namespace {

using crc32_internal::multiply;

/// x^(2^k) for all k that the number of bits of a file can have.
constexpr std::array<uint32_t, 64> make_powers() {
  std::array<uint32_t, 64> powers{};
  powers[0] = crc32_internal::power_of_x(1);
  for (size_t k = 1; k < powers.size(); ++k) powers[k] = multiply(powers[k - 1], powers[k - 1]);
  return powers;
}

constexpr std::array<uint32_t, 64> kPowers = make_powers();

std::vector<Crc32Kernel> find_kernels() {
  std::vector<Crc32Kernel> kernels = {{"table", &crc32_internal::update_table}};
  crc32_internal::append_x86_kernels(&kernels);
  crc32_internal::append_arm_kernels(&kernels);
  return kernels;
}

}  // namespace

const std::vector<Crc32Kernel>& crc32_kernels() {
  static const std::vector<Crc32Kernel>* kernels = new std::vector<Crc32Kernel>(find_kernels());
  return *kernels;
}

uint32_t crc32(uint32_t crc, const void* bytes, size_t size) {
#if defined(BCP_WITHOUT_CHECKS)
  return 0;  // a build of its own, to measure what the checks cost
#endif
  static const auto kUpdate = crc32_kernels().back().update;
  return ~kUpdate(~crc, static_cast<const uint8_t*>(bytes), size);
}

uint32_t crc32_combine(uint32_t crc_a, uint32_t crc_b, uint64_t length_b) {
  // x^(8n) is the product of x^(2^k) over the set bits k of 8n; 8n never needs bit 64 because length_b is a file
  // length.
  if (crc_a == 0) return crc_b;
  uint32_t shifted = crc_a;
  size_t k = 3;
  for (uint64_t n = length_b; n != 0; n >>= 1, ++k) {
    if (n & 1) shifted = multiply(kPowers[k & 63], shifted);
  }
  return shifted ^ crc_b;
}

}  // namespace bytecheckpoint::base
