// SPDX-License-Identifier: Apache-2.0
#include "csrc/base/crc32_kernels.h"

#if defined(__x86_64__)

#include <immintrin.h>

#include "csrc/base/crc32_polynomial.h"

// Folding: each vector of the message is multiplied by x^n mod P, where n is the number of bits between it and a later
// vector, and added to that vector. At the end one vector is left that has the same remainder as the message; it is
// reduced to 32 bits.
// Source: Gopal, Ozturk, Guilford et al., "Fast CRC Computation for Generic Polynomials Using PCLMULQDQ Instruction"
// (Intel, 2009), in its reflected form.
//
// The first qword of a vector holds the higher powers of x. The product of two reflected qwords has one bit less than a
// reflected vector, so each multiplication yields x times what its operands say. Hence the odd exponents below.

#define BCP_CRC32_PCLMUL "sse4.1,ssse3,pclmul"
#define BCP_CRC32_AVX2 "avx2,vpclmulqdq," BCP_CRC32_PCLMUL
#define BCP_CRC32_AVX512 "avx512f,vpclmulqdq," BCP_CRC32_PCLMUL
#define BCP_TARGET(isa) __attribute__((target(isa)))
// Helpers must be inlined: a call would spill vector registers, and kernels of wider vectors need the helpers in their
// own encoding.
#define BCP_TARGET_INLINE(isa) __attribute__((target(isa), always_inline)) inline

namespace bytecheckpoint::base {
namespace {

/// The multipliers that move 128 bits `bytes` further: one for each qword. The first qword is 64 bits further away.
struct FoldMultipliers {
  constexpr explicit FoldMultipliers(uint64_t bytes)
      : first(uint64_t{crc32_power_of_x(8 * bytes + 64 - 1)} << 32),
        second(uint64_t{crc32_power_of_x(8 * bytes - 1)} << 32) {}

  uint64_t first;
  uint64_t second;
};

constexpr FoldMultipliers kFold16(16), kFold32(32), kFold48(48), kFold64(64);
constexpr FoldMultipliers kFold128(128), kFold192(192), kFold256(256);

/// floor(x^95 / P), of degree 63, for Barrett's reduction of polynomials of degree up to 95.
constexpr uint64_t quotient_of_x95() {
  uint64_t quotient = 0;
  uint32_t remainder = crc32_power_of_x(31);
  for (int power = 63; power >= 0; --power) {
    if (remainder & 1) quotient |= uint64_t{1} << (63 - power);
    remainder = crc32_times_x(remainder);
  }
  return quotient;
}

constexpr uint64_t kQuotient = quotient_of_x95();
constexpr uint64_t kPolynomialTimesX31 = (uint64_t{kCrc32Polynomial} << 1) | 1;  // with its x^32
constexpr uint64_t kX95 = crc32_power_of_x(95);  // times x^32, because it is in the upper half

/// Operands of pshufb. The 16 bytes from `kShifts + n` on move a vector by n - 16 bytes towards its front, or by 16 - n
/// bytes towards its end. A set top bit marks a byte that the vector cannot fill.
alignas(16) constexpr uint8_t kShifts[48] = {
    0x80, 0x80, 0x80, 0x80, 0x80, 0x80, 0x80, 0x80, 0x80, 0x80, 0x80, 0x80, 0x80, 0x80, 0x80, 0x80,  //
    0,    1,    2,    3,    4,    5,    6,    7,    8,    9,    10,   11,   12,   13,   14,   15,    //
    0x80, 0x80, 0x80, 0x80, 0x80, 0x80, 0x80, 0x80, 0x80, 0x80, 0x80, 0x80, 0x80, 0x80, 0x80, 0x80};

BCP_TARGET_INLINE(BCP_CRC32_PCLMUL) __m128i load(const uint8_t* p) {
  return _mm_loadu_si128(reinterpret_cast<const __m128i*>(p));
}

/// Moves `vector` by `distance` and adds it to `next`, which lies that far behind it.
BCP_TARGET_INLINE(BCP_CRC32_PCLMUL) __m128i fold(__m128i vector, __m128i next, FoldMultipliers distance) {
  const __m128i by = _mm_set_epi64x(static_cast<long long>(distance.second), static_cast<long long>(distance.first));
  const __m128i first = _mm_clmulepi64_si128(vector, by, 0x00);
  const __m128i second = _mm_clmulepi64_si128(vector, by, 0x11);
  return _mm_xor_si128(_mm_xor_si128(first, second), next);
}

/// Folds four vectors that follow one another into one, in the place of the last.
BCP_TARGET_INLINE(BCP_CRC32_PCLMUL) __m128i join(__m128i v0, __m128i v1, __m128i v2, __m128i v3) {
  return fold(v0, fold(v1, fold(v2, v3, kFold16), kFold32), kFold48);
}

/// Returns the CRC state after `vector` as the whole message: vector * x^32 mod P.
BCP_TARGET_INLINE(BCP_CRC32_PCLMUL) uint32_t reduce(__m128i vector) {
  // Reduces 128 bits to 96, held in the upper part of a vector that then counts x^32 too many: first qword * x^128 +
  // second qword * x^64.
  const __m128i x95 = _mm_cvtsi64_si128(static_cast<long long>(kX95));
  const __m128i dividend = _mm_xor_si128(_mm_clmulepi64_si128(vector, x95, 0x00), _mm_srli_si128(vector, 8));
  // Barrett: the quotient by P is exactly the upper 64 bits of (the upper 64 bits times floor(x^95 / P)).
  const __m128i barrett =
      _mm_set_epi64x(static_cast<long long>(kPolynomialTimesX31), static_cast<long long>(kQuotient));
  const __m128i quotient = _mm_clmulepi64_si128(dividend, barrett, 0x00);
  const __m128i remainder = _mm_xor_si128(dividend, _mm_clmulepi64_si128(quotient, barrett, 0x10));
  return static_cast<uint32_t>(_mm_extract_epi32(remainder, 2));
}

/// Returns the CRC of a message that ends with `size` bytes at p. `vector` stands for the 16 bytes before p and all
/// bytes before those.
BCP_TARGET_INLINE(BCP_CRC32_PCLMUL) uint32_t finish(__m128i vector, const uint8_t* p, size_t size) {
  for (; size >= 16; size -= 16, p += 16) vector = fold(vector, load(p), kFold16);
  if (size != 0) {
    // Takes the last 16 + size bytes as two vectors: `begin` has the first `size` bytes of `vector` behind zeros, `end`
    // the last 16 bytes of the message. The load of `end` also reads bytes before p, for which `vector` already stands;
    // the blend takes those from `vector`.
    const __m128i begin = _mm_shuffle_epi8(vector, load(kShifts + size));
    const __m128i rest_to_front = load(kShifts + 16 + size);
    const __m128i end = _mm_blendv_epi8(_mm_shuffle_epi8(vector, rest_to_front), load(p + size - 16), rest_to_front);
    vector = fold(begin, end, kFold16);
  }
  return ~reduce(vector);
}

BCP_TARGET(BCP_CRC32_PCLMUL) uint32_t crc32_pclmul(uint32_t crc, const void* bytes, size_t size) {
  if (size < 16) return crc32_table(crc, bytes, size);
  const auto* p = static_cast<const uint8_t*>(bytes);
  // The state is added to the first bytes of the message, and is part of the message from here on.
  __m128i v0 = _mm_xor_si128(load(p), _mm_cvtsi32_si128(static_cast<int>(~crc)));
  if (size < 64) return finish(v0, p + 16, size - 16);
  // Four vectors at a time: while one waits for its products, those of the others are computed.
  __m128i v1 = load(p + 16), v2 = load(p + 32), v3 = load(p + 48);
  for (size -= 64, p += 64; size >= 64; size -= 64, p += 64) {
    v0 = fold(v0, load(p), kFold64);
    v1 = fold(v1, load(p + 16), kFold64);
    v2 = fold(v2, load(p + 32), kFold64);
    v3 = fold(v3, load(p + 48), kFold64);
  }
  return finish(join(v0, v1, v2, v3), p, size);
}

BCP_TARGET_INLINE(BCP_CRC32_AVX2) __m256i load256(const uint8_t* p) {
  return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p));
}

BCP_TARGET_INLINE(BCP_CRC32_AVX2) __m256i fold256(__m256i vector, __m256i next, FoldMultipliers distance) {
  const auto first_by = static_cast<long long>(distance.first), second_by = static_cast<long long>(distance.second);
  const __m256i by = _mm256_set_epi64x(second_by, first_by, second_by, first_by);
  const __m256i first = _mm256_clmulepi64_epi128(vector, by, 0x00);
  const __m256i second = _mm256_clmulepi64_epi128(vector, by, 0x11);
  return _mm256_xor_si256(_mm256_xor_si256(first, second), next);
}

BCP_TARGET(BCP_CRC32_AVX2) uint32_t crc32_avx2(uint32_t crc, const void* bytes, size_t size) {
  if (size < 128) return crc32_pclmul(crc, bytes, size);
  const auto* p = static_cast<const uint8_t*>(bytes);
  const __m256i state = _mm256_set_epi32(0, 0, 0, 0, 0, 0, 0, static_cast<int>(~crc));
  __m256i v0 = _mm256_xor_si256(load256(p), state), v1 = load256(p + 32), v2 = load256(p + 64), v3 = load256(p + 96);
  for (size -= 128, p += 128; size >= 128; size -= 128, p += 128) {
    v0 = fold256(v0, load256(p), kFold128);
    v1 = fold256(v1, load256(p + 32), kFold128);
    v2 = fold256(v2, load256(p + 64), kFold128);
    v3 = fold256(v3, load256(p + 96), kFold128);
  }
  v0 = fold256(v0, v2, kFold64);
  v1 = fold256(v1, v3, kFold64);
  if (size >= 64) {
    v0 = fold256(v0, load256(p), kFold64);
    v1 = fold256(v1, load256(p + 32), kFold64);
    size -= 64;
    p += 64;
  }
  const __m128i joined = join(_mm256_castsi256_si128(v0), _mm256_extracti128_si256(v0, 1), _mm256_castsi256_si128(v1),
                              _mm256_extracti128_si256(v1, 1));
  return finish(joined, p, size);
}

BCP_TARGET_INLINE(BCP_CRC32_AVX512) __m512i load512(const uint8_t* p) {
  return _mm512_loadu_si512(p);
}

BCP_TARGET_INLINE(BCP_CRC32_AVX512) __m512i fold512(__m512i vector, __m512i next, FoldMultipliers distance) {
  const auto first_by = static_cast<long long>(distance.first), second_by = static_cast<long long>(distance.second);
  const __m512i by = _mm512_set4_epi64(second_by, first_by, second_by, first_by);
  const __m512i first = _mm512_clmulepi64_epi128(vector, by, 0x00);
  const __m512i second = _mm512_clmulepi64_epi128(vector, by, 0x11);
  constexpr int kXorOfThree = 0x96;
  return _mm512_ternarylogic_epi64(first, second, next, kXorOfThree);
}

/// Returns lane k of four. The masked intrinsic with all lanes on, because gcc 12 warns of a variable that the plain
/// intrinsic leaves uninitialized on purpose.
template <int k>
BCP_TARGET_INLINE(BCP_CRC32_AVX512)
__m128i lane512(__m512i vector) {
  return _mm512_maskz_extracti32x4_epi32(0xFF, vector, k);
}

BCP_TARGET(BCP_CRC32_AVX512) uint32_t crc32_avx512(uint32_t crc, const void* bytes, size_t size) {
  if (size < 256) return crc32_pclmul(crc, bytes, size);
  const auto* p = static_cast<const uint8_t*>(bytes);
  const __m512i state = _mm512_zextsi128_si512(_mm_cvtsi32_si128(static_cast<int>(~crc)));
  __m512i v0 = _mm512_xor_si512(load512(p), state), v1 = load512(p + 64), v2 = load512(p + 128), v3 = load512(p + 192);
  for (size -= 256, p += 256; size >= 256; size -= 256, p += 256) {
    v0 = fold512(v0, load512(p), kFold256);
    v1 = fold512(v1, load512(p + 64), kFold256);
    v2 = fold512(v2, load512(p + 128), kFold256);
    v3 = fold512(v3, load512(p + 192), kFold256);
  }
  v0 = fold512(v0, fold512(v1, fold512(v2, v3, kFold64), kFold128), kFold192);
  for (; size >= 64; size -= 64, p += 64) v0 = fold512(v0, load512(p), kFold64);
  return finish(join(lane512<0>(v0), lane512<1>(v0), lane512<2>(v0), lane512<3>(v0)), p, size);
}

}  // namespace

void add_crc32_x86_kernels(std::vector<Crc32Kernel>* kernels) {
  // A CPU feature counts as supported only if the operating system saves the registers that it needs.
  __builtin_cpu_init();
  const bool pclmul = __builtin_cpu_supports("pclmul") && __builtin_cpu_supports("sse4.1");
  const bool wide = pclmul && __builtin_cpu_supports("vpclmulqdq");
  if (wide && __builtin_cpu_supports("avx512f")) kernels->push_back({"avx512", crc32_avx512});
  if (wide && __builtin_cpu_supports("avx2")) kernels->push_back({"avx2", crc32_avx2});
  if (pclmul) kernels->push_back({"pclmul", crc32_pclmul});
}

}  // namespace bytecheckpoint::base

#else

namespace bytecheckpoint::base {

void add_crc32_x86_kernels(std::vector<Crc32Kernel>*) {}

}  // namespace bytecheckpoint::base

#endif
