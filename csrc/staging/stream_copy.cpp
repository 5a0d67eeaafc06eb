// SPDX-License-Identifier: Apache-2.0
#include "csrc/staging/stream_copy.h"

#include <cstring>

#if defined(__SSE2__)
#include <emmintrin.h>

#include <algorithm>
#endif

namespace bytecheckpoint::staging {

#if defined(__SSE2__)

namespace {

constexpr int64_t kLineBytes = 64;

}  // namespace

void stream_copy(uint8_t* to, const uint8_t* from, int64_t bytes) {
  // Streams whole lines only: a line that is written in parts would have to be read after all.
  const int64_t head = std::min(bytes, static_cast<int64_t>(-reinterpret_cast<uintptr_t>(to) % kLineBytes));
  std::memcpy(to, from, static_cast<size_t>(head));
  int64_t at = head;
  for (; at + kLineBytes <= bytes; at += kLineBytes) {
    const auto* line = reinterpret_cast<const __m128i*>(from + at);
    auto* target = reinterpret_cast<__m128i*>(to + at);
    const __m128i a = _mm_loadu_si128(line), b = _mm_loadu_si128(line + 1);
    const __m128i c = _mm_loadu_si128(line + 2), d = _mm_loadu_si128(line + 3);
    _mm_stream_si128(target, a);
    _mm_stream_si128(target + 1, b);
    _mm_stream_si128(target + 2, c);
    _mm_stream_si128(target + 3, d);
  }
  std::memcpy(to + at, from + at, static_cast<size_t>(bytes - at));
}

void end_stream_copies() {
  _mm_sfence();
}

#else

void stream_copy(uint8_t* to, const uint8_t* from, int64_t bytes) {
  std::memcpy(to, from, static_cast<size_t>(bytes));
}

void end_stream_copies() {}

#endif

}  // namespace bytecheckpoint::staging
