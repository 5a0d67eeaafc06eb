// SPDX-License-Identifier: Apache-2.0
#include "csrc/staging/device_transfers.h"

#include <algorithm>
#include <thread>
#include <utility>

namespace bytecheckpoint::staging {
namespace {

using Clock = std::chrono::steady_clock;
using std::chrono::microseconds;

/// Returns the pause between two looks: a small part of the time waited so far, so that it adds little delay. Waiting
/// for an event instead would block all other threads from beginning a transfer meanwhile.
Clock::duration nap_after(Clock::duration waited) {
  return std::clamp<Clock::duration>(waited / 64, microseconds(20), microseconds(1000));
}

}  // namespace

base::Status DeviceTransfers::begin_gather(std::shared_ptr<SharedDeviceMerge> merge,
                                           const std::vector<DevicePiece>& pieces, uint8_t* host,
                                           uintptr_t caller_stream) {
  const base::Result<int64_t> transfer = merge->begin_gather(pieces, host, caller_stream);
  return note(std::move(merge), transfer);
}

base::Status DeviceTransfers::begin_scatter(std::shared_ptr<SharedDeviceMerge> merge,
                                            const std::vector<DevicePiece>& pieces, const uint8_t* host,
                                            uintptr_t caller_stream) {
  const base::Result<int64_t> transfer = merge->begin_scatter(pieces, host, caller_stream);
  return note(std::move(merge), transfer);
}

base::Status DeviceTransfers::note(std::shared_ptr<SharedDeviceMerge> merge, const base::Result<int64_t>& transfer) {
  if (!transfer.is_ok()) {
    end();
    return transfer.status();
  }
  parts_.push_back({std::move(merge), transfer.value()});
  return base::Status::ok();
}

base::Result<bool> DeviceTransfers::wait_for(std::chrono::milliseconds timeout) {
  const Clock::time_point begin = Clock::now();
  while (!parts_.empty()) {
    const base::Result<bool> is_done = parts_.back().merge->is_done(parts_.back().transfer);
    if (!is_done.is_ok()) {
      parts_.pop_back();
      end();
      return is_done.status();
    }
    if (is_done.value()) {
      parts_.pop_back();
      continue;
    }
    const Clock::duration waited = Clock::now() - begin;
    if (waited >= timeout) return false;
    std::this_thread::sleep_for(nap_after(waited));
  }
  return true;
}

void DeviceTransfers::end() {
  constexpr std::chrono::hours kLong(1);
  while (!parts_.empty()) static_cast<void>(wait_for(kLong));
}

}  // namespace bytecheckpoint::staging
