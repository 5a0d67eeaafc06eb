// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <sys/types.h>

#include <cstdint>
#include <memory>
#include <utility>
#include <vector>

#include "csrc/base/mutex.h"
#include "csrc/base/status.h"
#include "csrc/staging/device_merge.h"
#include "csrc/staging/pages.h"

namespace bytecheckpoint::staging {

/// The DeviceMerge of one device, for all that a process stages from it. Any thread. In a forked child everything is
/// kUnsupported.
class SharedDeviceMerge {
 public:
  /// That of `device`: made by the first call, which may take a moment, and kept until `drop_all`.
  /// \returns kUnsupported, also from then on, without device code, driver or device; kDevice.
  static base::Result<std::shared_ptr<SharedDeviceMerge>> find(int device);
  /// Gives back what the devices hold, of those that are in use when their last user is gone.
  static void drop_all();

  /// As of DeviceMerge.
  base::Result<int64_t> begin_gather(const std::vector<DevicePiece>& pieces, uint8_t* host, uintptr_t caller_stream);
  base::Result<bool> is_done(int64_t transfer);

 private:
  explicit SharedDeviceMerge(std::unique_ptr<DeviceMerge> merge) : merge_(std::move(merge)) {}

  base::Mutex mutex_;
  std::unique_ptr<DeviceMerge> merge_ BCP_GUARDED_BY(mutex_);
};

/// Page-locks the first `bytes` of `pages`, or more, until they are unmapped. No effect if an earlier call has locked
/// as many, or has failed to: then copies block whoever begins them, and are slower. While nothing is copied to them.
///
/// \param device  Any that is in use: pages are locked for all.
base::Status pin_pages(int device, int64_t bytes, Pages* pages);

}  // namespace bytecheckpoint::staging
