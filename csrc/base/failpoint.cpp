// SPDX-License-Identifier: Apache-2.0
#include "csrc/base/failpoint.h"

#if defined(BCP_FAILPOINTS)

#include <atomic>
#include <csignal>
#include <cstdlib>
#include <string_view>

namespace bytecheckpoint::base {

void hit_failpoint(Failpoint point) {
  const char* wanted = std::getenv("BCP_FAILPOINT");
  if (wanted == nullptr) return;
  std::string_view name(wanted);
  int action = SIGKILL;
  constexpr std::string_view kStop = "=stop";
  if (name.size() > kStop.size() && name.substr(name.size() - kStop.size()) == kStop) {
    action = SIGSTOP;
    name.remove_suffix(kStop.size());
  }
  int hits_wanted = 1;
  if (const size_t colon = name.find(':'); colon != std::string_view::npos) {
    hits_wanted = std::atoi(wanted + colon + 1);
    name = name.substr(0, colon);
  }
  if (name != kFailpointNames[static_cast<size_t>(point)]) return;
  static std::atomic<int> hits{0};
  if (++hits == hits_wanted) std::raise(action);
}

}  // namespace bytecheckpoint::base

#endif
