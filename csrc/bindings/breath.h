// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <chrono>
#include <thread>

#include "csrc/bindings/gil.h"

namespace bytecheckpoint::bindings {

/// Lets other Python threads run now and then, in a loop that holds the GIL over many values: `take` within the loop.
/// Whatever Python owns may have changed when it returns.
class Breath {
 public:
  void take() {
    if (++calls_ % kCallsALook != 0) return;
    const auto now = std::chrono::steady_clock::now();
    if (now - last_ < kHold) return;
    {
      const WithoutGil no_gil;
      // Else this thread would have it back before one that waits for it is awake.
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

}  // namespace bytecheckpoint::bindings
