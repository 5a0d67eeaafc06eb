// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>

namespace bytecheckpoint::fuzz {

/// Memory that a parser may take at a time for untrusted bytes: this many times their number, plus a fixed amount for
/// messages, the first few elements of vectors and one page of an archive.
inline constexpr int64_t kMaxTimes = 16;
inline constexpr int64_t kFreeBytes = 64 << 10;

/// Measures the memory that this thread allocates during the object's lifetime. Only AddressSanitizer's hooks see every
/// allocation; other builds count nothing and always stay within the bound. One object at a time.
class PeakMemory {
 public:
  explicit PeakMemory(size_t input_bytes, int64_t max_times = kMaxTimes, int64_t free_bytes = kFreeBytes);
  ~PeakMemory();
  PeakMemory(const PeakMemory&) = delete;
  PeakMemory& operator=(const PeakMemory&) = delete;

  /// Stops counting, so that the test's own memory does not count. \returns the fault, or an empty text.
  std::string stop();

 private:
  const int64_t limit_;
};

}  // namespace bytecheckpoint::fuzz
