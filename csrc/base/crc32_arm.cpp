// SPDX-License-Identifier: Apache-2.0
#include "csrc/base/crc32_kernels.h"

#if defined(__aarch64__) && defined(__linux__)

#include <arm_acle.h>
#include <asm/hwcap.h>
#include <sys/auxv.h>

#include <cstring>

#include "csrc/base/crc32.h"

#define BCP_CRC32_TARGET __attribute__((target("+crc")))

namespace bytecheckpoint::base {
namespace {

// Bytes per lane: a power of two, so that joining two lanes costs one multiplication, and so many that this cost does
// not count.
constexpr size_t kLaneBytes = 2048;

BCP_CRC32_TARGET inline uint32_t step(uint32_t state, const uint8_t* p) {
  uint64_t word;
  std::memcpy(&word, p, sizeof word);
  return __crc32d(state, word);
}

BCP_CRC32_TARGET uint32_t crc32_arm(uint32_t crc, const void* bytes, size_t size) {
  const auto* p = static_cast<const uint8_t*>(bytes);
  // A CRC instruction can start every cycle, but takes two or three cycles. With three lanes the unit is always busy;
  // one lane would wait for each result.
  for (; size >= 3 * kLaneBytes; size -= 3 * kLaneBytes, p += 3 * kLaneBytes) {
    uint32_t first = ~crc, second = ~0u, third = ~0u;
    for (const uint8_t* q = p; q != p + kLaneBytes; q += 8) {
      first = step(first, q);
      second = step(second, q + kLaneBytes);
      third = step(third, q + 2 * kLaneBytes);
    }
    crc = crc32_combine(crc32_combine(~first, ~second, kLaneBytes), ~third, kLaneBytes);
  }
  uint32_t state = ~crc;
  for (; size >= 64; size -= 64, p += 64) {
    for (int word = 0; word < 8; ++word) state = step(state, p + 8 * word);
  }
  for (; size >= 8; size -= 8, p += 8) state = step(state, p);
  for (; size != 0; --size) state = __crc32b(state, *p++);
  return ~state;
}

}  // namespace

void add_crc32_arm_kernels(std::vector<Crc32Kernel>* kernels) {
  if (getauxval(AT_HWCAP) & HWCAP_CRC32) kernels->push_back({"arm_crc", crc32_arm});
}

}  // namespace bytecheckpoint::base

#else

namespace bytecheckpoint::base {

void add_crc32_arm_kernels(std::vector<Crc32Kernel>*) {}

}  // namespace bytecheckpoint::base

#endif
