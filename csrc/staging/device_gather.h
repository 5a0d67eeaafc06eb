// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <chrono>
#include <cstdint>
#include <memory>
#include <vector>

#include "csrc/base/status.h"
#include "csrc/staging/shared_device_merge.h"

namespace bytecheckpoint::staging {

/// Copies the tensors of one state, from any number of devices, to a host buffer. Not thread-safe.
///
/// As long as a copy is under way, the buffer must not be touched, and the tensors must not be written or freed.
class DeviceGather {
 public:
  DeviceGather() = default;
  ~DeviceGather() { end(); }
  DeviceGather(const DeviceGather&) = delete;
  DeviceGather& operator=(const DeviceGather&) = delete;

  /// Begins to copy the tensors of one device. See `DeviceMerge::begin_gather`. After an error nothing is under way,
  /// also from other devices.
  base::Status begin(std::shared_ptr<SharedDeviceMerge> merge, const std::vector<DevicePiece>& pieces, uint8_t* host,
                     uintptr_t caller_stream);

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
  std::vector<Part> parts_;
};

}  // namespace bytecheckpoint::staging
