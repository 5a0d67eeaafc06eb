// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <chrono>
#include <thread>

#include "csrc/bridge/gil.h"

namespace bytecheckpoint::bridge {

/// Lets other Python threads run in a loop that holds the GIL over many values: call `take` once in each turn of the
/// loop. It releases the GIL after 2 ms of holding it. Anything that Python owns may have changed when it returns.
class GilYield {
 public:
  /// Releases the GIL if 2 ms have passed since it was last released; looks at the clock in each 64th call.
  void take() {
    if (++calls_ % kCallsALook != 0) return;
    const auto now = std::chrono::steady_clock::now();
    if (now - last_ < kHold) return;
    {
      const WithoutGil no_gil;
      // Otherwise this thread would take it back before one that waits for it is awake.
      std::this_thread::sleep_for(kAwake);
    }
    last_ = std::chrono::steady_clock::now();
  }

 private:
  static constexpr int kCallsALook = 64;
  static constexpr std::chrono::milliseconds kHold{2};
  static constexpr std::chrono::microseconds kAwake{20};
  int calls_ = 0;
  std::chrono::steady_clock::time_point last_ = std::chrono::steady_clock::now();
};

}  // namespace bytecheckpoint::bridge
