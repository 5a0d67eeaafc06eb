// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <chrono>
#include <cstdint>
#include <memory>
#include <vector>

#include "csrc/base/status.h"
#include "csrc/staging/shared_device_merge.h"

namespace bytecheckpoint::staging {

/// Copies tensors of any number of devices to host memory, or back. Not thread-safe.
///
/// As long as a copy is under way, what it writes must not be touched, and what it reads must not be written or freed.
class DeviceTransfers {
 public:
  DeviceTransfers() = default;
  ~DeviceTransfers() { end(); }
  DeviceTransfers(const DeviceTransfers&) = delete;
  DeviceTransfers& operator=(const DeviceTransfers&) = delete;

  /// Begins to copy tensors of one device to `host`. See `DeviceMerge::begin_gather`. After an error nothing is under
  /// way, also on other devices.
  base::Status begin_gather(std::shared_ptr<SharedDeviceMerge> merge, const std::vector<DevicePiece>& pieces,
                            uint8_t* host, uintptr_t caller_stream);
  /// The reverse.
  base::Status begin_scatter(std::shared_ptr<SharedDeviceMerge> merge, const std::vector<DevicePiece>& pieces,
                             const uint8_t* host, uintptr_t caller_stream);

  /// Waits until all is copied, at most for `timeout`. \returns whether all is copied. After an error nothing is under
  /// way.
  base::Result<bool> wait_for(std::chrono::milliseconds timeout);

  /// Waits until nothing is under way. Ignores errors.
  void end();
  bool is_under_way() const { return !parts_.empty(); }

 private:
  struct Part {
    std::shared_ptr<SharedDeviceMerge> merge;
    int64_t transfer;
  };
  base::Status note(std::shared_ptr<SharedDeviceMerge> merge, const base::Result<int64_t>& transfer);

  std::vector<Part> parts_;
};

}  // namespace bytecheckpoint::staging
