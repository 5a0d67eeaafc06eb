// SPDX-License-Identifier: Apache-2.0
#include "csrc/io/pending_calls.h"

#include "csrc/io/io_deadline.h"

namespace bytecheckpoint::io {

base::Status PendingCalls::status() {
  if (!is_bounded()) return base::Status::ok();
  const auto now = std::chrono::steady_clock::now();
  base::MutexLock lock(mutex_);
  for (const Call& call : calls_) {
    if (!call.is_pending || std::chrono::duration<double>(now - call.since).count() <= timeout_s_) continue;
    return no_answer(call.operation, call.path, timeout_s_);
  }
  return base::Status::ok();
}

}  // namespace bytecheckpoint::io
