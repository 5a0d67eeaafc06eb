// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>

namespace bytecheckpoint::fuzz {

/// What a parser may take at a time for bytes that may lie: this many times their number, and a little for what there
/// is of anything (messages, the first few elements of vectors, one page of an archive).
inline constexpr int64_t kMaxTimes = 16;
inline constexpr int64_t kFreeBytes = 64 << 10;

// Where the shortest value takes one byte and must be let in, no representation in memory keeps to that. What holds:
/// A Tree takes 80 bytes, and honest trees have nodes of one byte. Their number is bounded by that of the bytes.
inline constexpr int64_t kMaxTimesOfTree = 96;
/// A list without elements is an opcode of one byte, and 16 on the stack, 24 in the arena; vectors triple while they
/// grow.
inline constexpr int64_t kMaxTimesOfPickle = 128;
/// A pickle, and then the tree of it; small pickles may repeat what they share some thousand times.
inline constexpr int64_t kMaxTimesOfUnfolding = 192;
inline constexpr int64_t kFreeBytesOfUnfolding = 640 << 10;

/// Memory that this thread takes while it lives. Under AddressSanitizer alone, whose hooks see every allocation; in
/// other builds nothing is counted and everything is within bounds. One at a time.
class PeakMemory {
 public:
  explicit PeakMemory(size_t input_bytes, int64_t max_times = kMaxTimes, int64_t free_bytes = kFreeBytes);
  ~PeakMemory();
  PeakMemory(const PeakMemory&) = delete;
  PeakMemory& operator=(const PeakMemory&) = delete;

  /// Stops counting: what the test itself takes is none of the parser's. \returns the fault, or an empty text.
  std::string stop();

 private:
  const int64_t limit_;
};

}  // namespace bytecheckpoint::fuzz
