// SPDX-License-Identifier: Apache-2.0
// CRC-32 by carry-less multiplication: the message is folded onto its end, 16 bytes standing for all before them.
// Source: Gopal et al., "Fast CRC Computation for Generic Polynomials Using PCLMULQDQ Instruction", Intel 2009.

#include "csrc/base/crc32_kernels.h"

#if defined(__x86_64__)

#if defined(__GNUC__) && !defined(__clang__)
// The intrinsics of gcc 12 begin from values that they call undefined, and it warns of its own headers.
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#pragma GCC diagnostic ignored "-Wuninitialized"
#endif
#include <immintrin.h>

namespace bytecheckpoint::base::crc32_internal {
namespace {

/// What moves one half of a 16 byte lane ahead by `exponent` bits. The product of two reflected polynomials is one bit
/// short of 128, hence the shift; the halves are 64 bits apart and the remainder has 32, hence the +32 and -32 below.
constexpr int64_t fold_constant(uint64_t exponent) {
  return static_cast<int64_t>(static_cast<uint64_t>(power_of_x(exponent)) << 1);
}

/// The two constants that fold a lane onto the one `bits` further on: for its first half, and its second.
struct FoldBy {
  int64_t first, second;
};
constexpr FoldBy fold_by(uint64_t bits) {
  return {fold_constant(bits + 32), fold_constant(bits - 32)};
}

#define BCP_TARGET_PCLMUL __attribute__((target("pclmul,sse4.1")))
#define BCP_TARGET_VPCLMUL __attribute__((target("vpclmulqdq,avx512f,pclmul,sse4.1")))

BCP_TARGET_PCLMUL inline __m128i load_lane(const uint8_t* bytes) {
  return _mm_loadu_si128(reinterpret_cast<const __m128i*>(bytes));
}

BCP_TARGET_PCLMUL inline __m128i constants(FoldBy fold) {
  return _mm_set_epi64x(fold.second, fold.first);
}

BCP_TARGET_PCLMUL inline __m128i fold_lane(__m128i lane, __m128i by, __m128i onto) {
  const __m128i first = _mm_clmulepi64_si128(lane, by, 0x00);
  const __m128i second = _mm_clmulepi64_si128(lane, by, 0x11);
  return _mm_xor_si128(_mm_xor_si128(first, second), onto);
}

/// What is left when one lane stands for all that came before: its 16 bytes, and the rest of the message.
BCP_TARGET_PCLMUL uint32_t finish(__m128i lane, const uint8_t* bytes, size_t size) {
  constexpr FoldBy kOneLane = fold_by(128);
  for (; size >= 16; size -= 16, bytes += 16) lane = fold_lane(lane, constants(kOneLane), load_lane(bytes));
  alignas(16) uint8_t last[16];
  _mm_store_si128(reinterpret_cast<__m128i*>(last), lane);
  return update_table(update_table(0, last, sizeof last), bytes, size);
}

/// Four lanes at a time.
BCP_TARGET_PCLMUL uint32_t update_pclmul(uint32_t state, const uint8_t* bytes, size_t size) {
  if (size < 64) return update_table(state, bytes, size);
  constexpr FoldBy kFourLanes = fold_by(4 * 128), kOneLane = fold_by(128);
  __m128i lane[4];
  for (int i = 0; i < 4; ++i) lane[i] = load_lane(bytes + 16 * i);
  lane[0] = _mm_xor_si128(lane[0], _mm_cvtsi32_si128(static_cast<int>(state)));
  const __m128i by = constants(kFourLanes);
  for (bytes += 64, size -= 64; size >= 64; bytes += 64, size -= 64) {
    for (int i = 0; i < 4; ++i) lane[i] = fold_lane(lane[i], by, load_lane(bytes + 16 * i));
  }
  for (int i = 1; i < 4; ++i) lane[0] = fold_lane(lane[0], constants(kOneLane), lane[i]);
  return finish(lane[0], bytes, size);
}

BCP_TARGET_VPCLMUL inline __m512i fold_four(__m512i lanes, __m512i by, __m512i onto) {
  constexpr int kXorOfThree = 0x96;
  return _mm512_ternarylogic_epi64(_mm512_clmulepi64_epi128(lanes, by, 0x00), _mm512_clmulepi64_epi128(lanes, by, 0x11),
                                   onto, kXorOfThree);
}

/// Sixteen lanes at a time, in four registers.
BCP_TARGET_VPCLMUL uint32_t update_vpclmul512(uint32_t state, const uint8_t* bytes, size_t size) {
  if (size < 512) return update_pclmul(state, bytes, size);
  constexpr FoldBy kSixteenLanes = fold_by(16 * 128), kFourLanes = fold_by(4 * 128), kOneLane = fold_by(128);
  __m512i lanes[4];
  for (int i = 0; i < 4; ++i) lanes[i] = _mm512_loadu_si512(bytes + 64 * i);
  lanes[0] = _mm512_xor_si512(lanes[0], _mm512_zextsi128_si512(_mm_cvtsi32_si128(static_cast<int>(state))));
  const __m512i by = _mm512_broadcast_i32x4(constants(kSixteenLanes));
  for (bytes += 256, size -= 256; size >= 256; bytes += 256, size -= 256) {
    for (int i = 0; i < 4; ++i) lanes[i] = fold_four(lanes[i], by, _mm512_loadu_si512(bytes + 64 * i));
  }
  const __m512i by_four = _mm512_broadcast_i32x4(constants(kFourLanes));
  for (int i = 1; i < 4; ++i) lanes[0] = fold_four(lanes[0], by_four, lanes[i]);
  for (; size >= 64; bytes += 64, size -= 64) lanes[0] = fold_four(lanes[0], by_four, _mm512_loadu_si512(bytes));
  __m128i lane = _mm512_castsi512_si128(lanes[0]);
  lane = fold_lane(lane, constants(kOneLane), _mm512_extracti32x4_epi32(lanes[0], 1));
  lane = fold_lane(lane, constants(kOneLane), _mm512_extracti32x4_epi32(lanes[0], 2));
  lane = fold_lane(lane, constants(kOneLane), _mm512_extracti32x4_epi32(lanes[0], 3));
  return finish(lane, bytes, size);
}

}  // namespace

void append_x86_kernels(std::vector<Crc32Kernel>* kernels) {
  // These ask the operating system, too, whether it saves the wide registers.
  __builtin_cpu_init();
  if (!__builtin_cpu_supports("pclmul") || !__builtin_cpu_supports("sse4.1")) return;
  kernels->push_back({"pclmul", &update_pclmul});
  if (!__builtin_cpu_supports("vpclmulqdq") || !__builtin_cpu_supports("avx512f")) return;
  kernels->push_back({"vpclmul512", &update_vpclmul512});
}

}  // namespace bytecheckpoint::base::crc32_internal

#else

namespace bytecheckpoint::base::crc32_internal {
void append_x86_kernels(std::vector<Crc32Kernel>*) {}
}  // namespace bytecheckpoint::base::crc32_internal

#endif
