// SPDX-License-Identifier: Apache-2.0
#pragma once

namespace bytecheckpoint::test {

/// Number of repetitions of a case without threads: `n`, or less under ASan, which slows it down, and under TSan, which
/// finds nothing in it.
constexpr int rounds(int n) {
#if defined(__SANITIZE_THREAD__)  // gcc's macro
  return n / 10;
#elif defined(__SANITIZE_ADDRESS__)
  return n / 4;
#else
  return n;
#endif
}

}  // namespace bytecheckpoint::test
