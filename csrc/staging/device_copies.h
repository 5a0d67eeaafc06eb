// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <vector>

#include "csrc/base/status.h"
#include "csrc/staging/device_piece.h"
#include "csrc/staging/load_targets.h"
#include "csrc/staging/shared_device_merge.h"
#include "csrc/tensor/strided_view.h"

namespace bytecheckpoint::staging {

/// The copies between tensors on devices and host memory of one save or one load. Whatever the calls of `add` name is
/// copied when `gather` or `scatter` returns:
///
///     add: bytes of tensor a, of b, ...   ->   slot |  a  |head|  b  |head|  c    |      gather: devices to host
///                                                   |  a  |    |  b  |    |  c    |      scatter: host to devices
///
/// Copies begin behind what the caller's streams have to do at that time. Not thread-safe.
class DeviceCopies {
 public:
  /// Makes tensors of a device known, unless they are. Takes a moment the first time in a process.
  /// \param caller_stream  The caller's current stream of the device, a cudaStream_t as an integer.
  /// \returns whether they can be copied: not without device code or driver. kDevice.
  base::Result<bool> use(int device, uintptr_t caller_stream);
  bool knows(int device) const { return devices_.count(device) != 0; }
  /// What `use` said of a device that is known.
  bool can_copy(int device) const { return devices_.at(device).merge != nullptr; }
  /// A device that is in use; kHost if none is.
  int any_device() const;

  /// Adds bytes [begin, end) of the row-major elements of a tensor: what `gather` copies to `host`, and `scatter` from
  /// there. They are on element boundaries.
  /// \param device  One that `use` said true for. \param view  `data` is memory of that device.
  base::Status add(int device, const tensor::StridedView& view, int64_t begin, int64_t end, uint8_t* host);
  /// Copies to the host what was added, and forgets it. Up to kMaxGapBytes of host memory between two neighbours of one
  /// device, of which the second was added later, may become 0. \returns kDevice; then nothing is under way.
  base::Status gather();
  /// Copies to the devices what was added, and forgets it. No memory of a device may have been added twice.
  /// \returns kDevice; then nothing is under way.
  base::Status scatter();
  /// Forgets what was added.
  void clear();

 private:
  struct Added {
    tensor::StridedView view;
    int64_t bytes;
    uint8_t* host;
  };
  struct Device {
    std::shared_ptr<SharedDeviceMerge> merge;  // null if its tensors cannot be copied
    uintptr_t caller_stream;
    std::vector<Added> added;
  };

  template <class Begin>
  base::Status run(const Begin& begin);

  std::map<int, Device> devices_;
};

}  // namespace bytecheckpoint::staging
