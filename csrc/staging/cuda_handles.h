// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cuda_runtime.h>

#include <memory>
#include <string_view>
#include <type_traits>

#include "csrc/base/status.h"

// Errors and handles of the CUDA runtime as Status and owners.
namespace bytecheckpoint::staging {

/// `operation: what CUDA says (its name)`, or ok.
inline base::Status check_cuda(std::string_view operation, cudaError_t error) {
  if (error == cudaSuccess) return base::Status::ok();
  cudaGetLastError();  // forgotten, or the next check of a launch would find it
  const bool absent = error == cudaErrorNoDevice || error == cudaErrorInsufficientDriver ||
                      error == cudaErrorInvalidDevice || error == cudaErrorNoKernelImageForDevice ||
                      error == cudaErrorInvalidDeviceFunction || error == cudaErrorStubLibrary;
  return base::Status::make(absent ? base::Code::kUnsupported : base::Code::kDevice,
                            base::text(operation, ": ", cudaGetErrorString(error), " (", cudaGetErrorName(error), ")"));
}

// Destroying fails only where there is nothing left to destroy: after a fault of the device, or at the end of the
// process, when the driver is gone.
struct DestroyStream {
  void operator()(cudaStream_t stream) const { static_cast<void>(cudaStreamDestroy(stream)); }
};
struct DestroyEvent {
  void operator()(cudaEvent_t event) const { static_cast<void>(cudaEventDestroy(event)); }
};
struct FreeOnDevice {
  void operator()(uint8_t* memory) const { static_cast<void>(cudaFree(memory)); }
};
struct FreePinned {
  void operator()(uint8_t* memory) const { static_cast<void>(cudaFreeHost(memory)); }
};
using Stream = std::unique_ptr<std::remove_pointer_t<cudaStream_t>, DestroyStream>;
using Event = std::unique_ptr<std::remove_pointer_t<cudaEvent_t>, DestroyEvent>;
using DeviceMemory = std::unique_ptr<uint8_t, FreeOnDevice>;
using PinnedMemory = std::unique_ptr<uint8_t, FreePinned>;

/// Waits for nothing that other streams do, the legacy default stream included.
inline base::Status make_stream(Stream* stream) {
  cudaStream_t made = nullptr;
  const cudaError_t error = cudaStreamCreateWithFlags(&made, cudaStreamNonBlocking);
  if (error == cudaSuccess) stream->reset(made);
  return check_cuda("cudaStreamCreateWithFlags", error);
}

/// Whoever waits for it on the host sleeps, instead of taking a processor from the input pipeline.
inline base::Status make_event(Event* event) {
  cudaEvent_t made = nullptr;
  const cudaError_t error = cudaEventCreateWithFlags(&made, cudaEventDisableTiming | cudaEventBlockingSync);
  if (error == cudaSuccess) event->reset(made);
  return check_cuda("cudaEventCreateWithFlags", error);
}

inline base::Status record(const Event& event, cudaStream_t stream) {
  return check_cuda("cudaEventRecord", cudaEventRecord(event.get(), stream));
}

/// What is enqueued on `stream` from now on waits for what `event` was last recorded behind.
inline base::Status wait_for(const Event& event, cudaStream_t stream) {
  return check_cuda("cudaStreamWaitEvent", cudaStreamWaitEvent(stream, event.get(), 0));
}

}  // namespace bytecheckpoint::staging
