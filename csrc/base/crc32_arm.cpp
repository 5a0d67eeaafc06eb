// SPDX-License-Identifier: Apache-2.0
#include "csrc/base/crc32_kernels.h"

#if defined(__aarch64__)

#include <arm_acle.h>
#include <sys/auxv.h>

#include <cstring>

namespace bytecheckpoint::base::crc32_internal {
namespace {

constexpr unsigned long kHwcapCrc32 = 1 << 7;  // HWCAP_CRC32 of <asm/hwcap.h>

__attribute__((target("+crc"))) inline uint32_t update_words(uint32_t state, const uint8_t* bytes, size_t num_words) {
  for (size_t i = 0; i < num_words; ++i) {
    uint64_t word;
    std::memcpy(&word, bytes + 8 * i, sizeof word);
    state = __crc32d(state, word);
  }
  return state;
}

/// The instruction takes three cycles and one can begin in each: three stretches are summed side by side and joined.
__attribute__((target("+crc"))) uint32_t update_arm(uint32_t state, const uint8_t* bytes, size_t size) {
  constexpr size_t kStretchWords = 512;
  constexpr size_t kStretch = 8 * kStretchWords;
  constexpr uint32_t kAppendOne = power_of_x(8 * kStretch);
  constexpr uint32_t kAppendTwo = power_of_x(16 * kStretch);
  for (; size >= 3 * kStretch; bytes += 3 * kStretch, size -= 3 * kStretch) {
    uint32_t second = 0, third = 0;
    for (size_t i = 0; i < kStretchWords; ++i) {
      uint64_t word[3];
      for (size_t s = 0; s < 3; ++s) std::memcpy(&word[s], bytes + s * kStretch + 8 * i, sizeof word[s]);
      state = __crc32d(state, word[0]);
      second = __crc32d(second, word[1]);
      third = __crc32d(third, word[2]);
    }
    state = multiply(kAppendTwo, state) ^ multiply(kAppendOne, second) ^ third;
  }
  state = update_words(state, bytes, size / 8);
  bytes += size / 8 * 8;
  for (size_t i = 0; i < size % 8; ++i) state = __crc32b(state, bytes[i]);
  return state;
}

}  // namespace

void append_arm_kernels(std::vector<Crc32Kernel>* kernels) {
  if ((::getauxval(AT_HWCAP) & kHwcapCrc32) != 0) kernels->push_back({"arm", &update_arm});
}

}  // namespace bytecheckpoint::base::crc32_internal

#else

namespace bytecheckpoint::base::crc32_internal {
void append_arm_kernels(std::vector<Crc32Kernel>*) {}
}  // namespace bytecheckpoint::base::crc32_internal

#endif
