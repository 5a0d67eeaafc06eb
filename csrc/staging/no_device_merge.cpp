// SPDX-License-Identifier: Apache-2.0
// Stands in for cuda_device_merge.cu in builds without nvcc.

#include "csrc/staging/device_merge.h"

namespace bytecheckpoint::staging {
namespace {

base::Status no_device_code() {
  return base::Status::make(base::Code::kUnsupported, "this build has no device code: it was made without nvcc");
}

}  // namespace

class DeviceMerge::Impl {};

bool DeviceMerge::is_built() {
  return false;
}
const char* DeviceMerge::architectures() {
  return "";
}
base::Result<std::unique_ptr<DeviceMerge>> DeviceMerge::create(int, int64_t) {
  return no_device_code();
}
DeviceMerge::DeviceMerge(std::unique_ptr<Impl> impl) : impl_(std::move(impl)) {}
DeviceMerge::~DeviceMerge() = default;
base::Result<int64_t> DeviceMerge::begin_gather(const std::vector<DevicePiece>&, uint8_t*, uintptr_t) {
  return no_device_code();
}
base::Result<int64_t> DeviceMerge::begin_scatter(const std::vector<DevicePiece>&, const uint8_t*, uintptr_t) {
  return no_device_code();
}
base::Status DeviceMerge::make_stream_wait(uintptr_t) {
  return no_device_code();
}
base::Result<bool> DeviceMerge::is_done(int64_t) {
  return no_device_code();
}
base::Status DeviceMerge::wait(int64_t) {
  return no_device_code();
}
base::Status DeviceMerge::pin_pages(int, void*, int64_t) {
  return no_device_code();
}
base::Status DeviceMerge::unpin_pages(int, void*) {
  return no_device_code();
}
int DeviceMerge::device() const {
  return -1;
}
int64_t DeviceMerge::scratch_bytes() const {
  return 0;
}

}  // namespace bytecheckpoint::staging
