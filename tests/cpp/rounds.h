// SPDX-License-Identifier: Apache-2.0
#pragma once

namespace bytecheckpoint::test {

/// How often a case that has no threads repeats itself: `n` times, less where TSan, which finds nothing in it, slows it
/// down.
constexpr int rounds(int n) {
#ifdef __SANITIZE_THREAD__  // of gcc
  return n / 10;
#else
  return n;
#endif
}

}  // namespace bytecheckpoint::test
