// SPDX-License-Identifier: Apache-2.0
#include "csrc/staging/device_copies.h"

#include <algorithm>
#include <chrono>
#include <utility>

#include "csrc/staging/device_transfers.h"
#include "csrc/tensor/flat_range.h"

namespace bytecheckpoint::staging {
namespace {

using base::Status;

constexpr std::chrono::hours kLong(1);

/// Takes pieces from `added` that ascend in host memory without overlap, as one transfer must, and leaves the others.
/// \param first  Receives the first byte of host memory, from which the offsets of the pieces count.
template <class Added>
std::vector<DevicePiece> take_ascending(std::vector<Added>* added, uint8_t** first) {
  std::vector<DevicePiece> pieces;
  std::vector<Added> left;
  uint8_t* end = added->front().host;
  *first = end;
  for (Added& each : *added) {
    if (each.host < end) {
      left.push_back(std::move(each));
      continue;
    }
    pieces.push_back({std::move(each.view), each.host - *first});
    end = each.host + each.bytes;
  }
  *added = std::move(left);
  return pieces;
}

}  // namespace

base::Result<bool> DeviceCopies::use(int device, uintptr_t caller_stream) {
  const auto known = devices_.find(device);
  if (known != devices_.end()) return can_copy(device);
  auto merge = SharedDeviceMerge::find(device);
  const bool is_supported = merge.status().code() != base::Code::kUnsupported;
  if (is_supported && !merge.is_ok()) return merge.status();
  devices_[device] = {is_supported ? std::move(merge.value()) : nullptr, caller_stream, {}};
  return is_supported;
}

int DeviceCopies::any_device() const {
  for (const auto& [number, device] : devices_) {
    if (device.merge != nullptr) return number;
  }
  return kHost;
}

Status DeviceCopies::add(int device, const tensor::StridedView& view, int64_t begin, int64_t end, uint8_t* host) {
  std::vector<Added>& added = devices_.at(device).added;
  const int64_t itemsize = tensor::find_dtype(view.dtype)->itemsize_bytes;
  BCP_ASSIGN_OR_RETURN(const std::vector<tensor::Box> boxes,
                       tensor::boxes_of_flat_range(view.sizes, begin / itemsize, end / itemsize));
  for (const tensor::Box& box : boxes) {
    int64_t bytes = itemsize;
    for (const int64_t size : box.sizes) bytes *= size;
    added.push_back({tensor::part_of(view, box.offsets, box.sizes), bytes, host});
    host += bytes;
  }
  return Status::ok();
}

template <class Begin>
Status DeviceCopies::run(const Begin& begin) {
  DeviceTransfers transfers;
  for (auto& [number, device] : devices_) {
    std::vector<Added> added = std::exchange(device.added, {});
    while (!added.empty()) {
      uint8_t* first = nullptr;
      const std::vector<DevicePiece> pieces = take_ascending(&added, &first);
      const Status begun = begin(&transfers, device, pieces, first);
      if (begun.is_ok()) continue;
      clear();
      return begun;
    }
  }
  while (true) {
    const base::Result<bool> is_done = transfers.wait_for(kLong);
    if (!is_done.is_ok() || is_done.value()) return is_done.status();
  }
}

Status DeviceCopies::gather() {
  // Not sorted: slots follow one another in a file in any order. In the order of the file, only memory that is filled
  // later is between two neighbours.
  return run([](DeviceTransfers* transfers, const Device& device, const std::vector<DevicePiece>& pieces,
                uint8_t* first) { return transfers->begin_gather(device.merge, pieces, first, device.caller_stream); });
}

Status DeviceCopies::scatter() {
  for (auto& [number, device] : devices_) {
    std::stable_sort(device.added.begin(), device.added.end(),
                     [](const Added& a, const Added& b) { return a.host < b.host; });
  }
  return run(
      [](DeviceTransfers* transfers, const Device& device, const std::vector<DevicePiece>& pieces, uint8_t* first) {
        return transfers->begin_scatter(device.merge, pieces, first, device.caller_stream);
      });
}

void DeviceCopies::clear() {
  for (auto& [number, device] : devices_) device.added.clear();
}

}  // namespace bytecheckpoint::staging
