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
