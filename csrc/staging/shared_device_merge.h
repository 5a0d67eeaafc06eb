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

/// The one DeviceMerge of a device that all of a process shares. Thread-safe. In a forked child every call returns
/// kUnsupported.
class SharedDeviceMerge {
 public:
  /// Returns that of `device`. The first call makes it, which may take a moment; it is kept until `drop_all`.
  /// \returns kUnsupported without device code, driver or device; later calls then return it at once. kDevice.
  static base::Result<std::shared_ptr<SharedDeviceMerge>> find(int device);
  /// Gives the memory of all devices back. What is in use is given back when its last user is gone.
  static void drop_all();

  // See the functions of the same names of DeviceMerge.
  base::Result<int64_t> begin_gather(const std::vector<DevicePiece>& pieces, uint8_t* host, uintptr_t caller_stream);
  base::Result<int64_t> begin_scatter(const std::vector<DevicePiece>& pieces, const uint8_t* host,
                                      uintptr_t caller_stream);
  base::Result<bool> is_done(int64_t transfer);

 private:
  explicit SharedDeviceMerge(std::unique_ptr<DeviceMerge> merge) : merge_(std::move(merge)) {}

  base::Mutex mutex_;
  std::unique_ptr<DeviceMerge> merge_ BCP_GUARDED_BY(mutex_);
};

/// Page-locks at least the first `bytes` of `pages` until they are unmapped. No device may copy to them meanwhile. No
/// effect if an earlier call has locked as many, or tried and failed: copies are then slower, and block the thread that
/// begins them. Forked children do not get the memory: on older kernels a write of the parent would else go to another
/// page than the one that the device knows.
///
/// \param device  Any device in use: pages are locked for all devices.
base::Status pin_pages(int device, int64_t bytes, Pages* pages);

}  // namespace bytecheckpoint::staging
