// SPDX-License-Identifier: Apache-2.0
#include "csrc/staging/stream_copy.h"

#include <cstring>

#if defined(__x86_64__)
#include <immintrin.h>

#include <algorithm>
#endif

namespace bytecheckpoint::staging {

#if defined(__x86_64__)

namespace {

constexpr int64_t kLineBytes = 64;

void fetch(const uint8_t* next, int64_t at, int64_t next_bytes) {
  if (at < next_bytes) _mm_prefetch(reinterpret_cast<const char*>(next + at), _MM_HINT_T0);
}

void stream_lines_sse2(uint8_t* to, const uint8_t* from, int64_t bytes, const uint8_t* next, int64_t next_bytes) {
  for (int64_t at = 0; at < bytes; at += kLineBytes) {
    fetch(next, at, next_bytes);
    const auto* line = reinterpret_cast<const __m128i*>(from + at);
    auto* target = reinterpret_cast<__m128i*>(to + at);
    const __m128i a = _mm_loadu_si128(line), b = _mm_loadu_si128(line + 1);
    const __m128i c = _mm_loadu_si128(line + 2), d = _mm_loadu_si128(line + 3);
    _mm_stream_si128(target, a);
    _mm_stream_si128(target + 1, b);
    _mm_stream_si128(target + 2, c);
    _mm_stream_si128(target + 3, d);
  }
}

/// A line is one store, so that none ever leaves the core in parts.
__attribute__((target("avx512f"))) void stream_lines_avx512(uint8_t* to, const uint8_t* from, int64_t bytes,
                                                            const uint8_t* next, int64_t next_bytes) {
  for (int64_t at = 0; at < bytes; at += kLineBytes) {
    fetch(next, at, next_bytes);
    _mm512_stream_si512(reinterpret_cast<__m512i*>(to + at), _mm512_loadu_si512(from + at));
  }
}

}  // namespace

std::vector<StreamKernel> stream_kernels() {
  std::vector<StreamKernel> kernels;
  __builtin_cpu_init();
  if (__builtin_cpu_supports("avx512f")) kernels.push_back({"avx512", stream_lines_avx512});
  kernels.push_back({"sse2", stream_lines_sse2});
  return kernels;
}

void stream_copy(uint8_t* to, const uint8_t* from, int64_t bytes, const uint8_t* next, int64_t next_bytes) {
  static const StreamKernel fastest = stream_kernels().front();
  // Streams whole lines only: a line that is written in parts would have to be read after all.
  const int64_t head = std::min(bytes, static_cast<int64_t>(-reinterpret_cast<uintptr_t>(to) % kLineBytes));
  std::memcpy(to, from, static_cast<size_t>(head));
  const int64_t lines = (bytes - head) / kLineBytes * kLineBytes;
  fastest.copy_lines(to + head, from + head, lines, next, next_bytes);
  std::memcpy(to + head + lines, from + head + lines, static_cast<size_t>(bytes - head - lines));
}

void end_stream_copies() {
  _mm_sfence();
}

#else

void stream_copy(uint8_t* to, const uint8_t* from, int64_t bytes, const uint8_t*, int64_t) {
  std::memcpy(to, from, static_cast<size_t>(bytes));
}

std::vector<StreamKernel> stream_kernels() {
  return {};
}

void end_stream_copies() {}

#endif

}  // namespace bytecheckpoint::staging
