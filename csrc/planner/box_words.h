// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>

namespace bytecheckpoint::planner {

// An inventory may have 20 million boxes, so it keeps their numbers as words of 32 bits: one word a number. If a number
// of any box of an entry needs more bits, the entry is wide: each number takes two words, the high one first. Comparing
// the words of two boxes of an entry therefore gives the same as comparing their numbers, which are never negative.

/// Returns how many words `count` numbers take.
inline size_t num_words(size_t count, bool is_wide) {
  return is_wide ? 2 * count : count;
}

/// Returns whether a number does not fit in one word.
inline bool needs_wide(const int64_t* numbers, size_t count) {
  int64_t bits = 0;
  for (size_t i = 0; i < count; ++i) bits |= numbers[i];
  return bits > UINT32_MAX;
}

/// Stores numbers. \returns the place behind them.
inline uint32_t* pack_numbers(const int64_t* numbers, size_t count, bool is_wide, uint32_t* words) {
  for (size_t i = 0; i < count; ++i) {
    if (is_wide) *words++ = static_cast<uint32_t>(numbers[i] >> 32);
    *words++ = static_cast<uint32_t>(numbers[i]);
  }
  return words;
}

/// Reads back number `i` of those that `pack_numbers` stored.
inline int64_t unpack_number(const uint32_t* words, size_t i, bool is_wide) {
  return is_wide ? int64_t{words[2 * i]} << 32 | words[2 * i + 1] : words[i];
}

/// Reads back all of them.
inline void unpack_numbers(const uint32_t* words, size_t count, bool is_wide, int64_t* numbers) {
  if (!is_wide) {
    std::copy_n(words, count, numbers);
    return;
  }
  for (size_t i = 0; i < count; ++i) numbers[i] = unpack_number(words, i, true);
}

/// Compares boxes of the same entry, as words. \returns a number below, at or above 0.
inline int compare_words(const uint32_t* a, const uint32_t* b, size_t count) {
  for (size_t i = 0; i < count; ++i) {
    if (a[i] != b[i]) return a[i] < b[i] ? -1 : 1;
  }
  return 0;
}

}  // namespace bytecheckpoint::planner
