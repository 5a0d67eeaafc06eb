// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <chrono>
#include <cstdint>
#include <memory>
#include <vector>

#include "csrc/base/status.h"
#include "csrc/staging/shared_device_merge.h"

namespace bytecheckpoint::staging {

/// Tensors of one state, of any number of devices, on their way to a host buffer. One thread at a time.
///
/// As long as something is under way the buffer must not be touched, nor the tensors be written or freed.
class DeviceGather {
 public:
  DeviceGather() = default;
  ~DeviceGather() { end(); }
  DeviceGather(const DeviceGather&) = delete;
  DeviceGather& operator=(const DeviceGather&) = delete;

  /// As `DeviceMerge::begin_gather`. After an error nothing is under way, also of other devices.
  base::Status begin(std::shared_ptr<SharedDeviceMerge> merge, const std::vector<DevicePiece>& pieces, uint8_t* host,
                     uintptr_t caller_stream);

  /// Is everything there? Waits for that, at most for `timeout`. After an error nothing is under way.
  base::Result<bool> wait_for(std::chrono::milliseconds timeout);

  /// Waits until nothing is under way, whatever becomes of it.
  void end();
  bool is_under_way() const { return !parts_.empty(); }

 private:
  struct Part {
    std::shared_ptr<SharedDeviceMerge> merge;
    int64_t transfer;
  };
  std::vector<Part> parts_;
};

}  // namespace bytecheckpoint::staging
