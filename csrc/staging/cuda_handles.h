// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cuda_runtime.h>

#include <memory>
#include <string_view>
#include <type_traits>

#include "csrc/base/status.h"

// Errors of the CUDA runtime as Status, and owners of its handles.
namespace bytecheckpoint::staging {

/// Turns a CUDA error into a Status, with the message `operation: CUDA's text (CUDA's name)`. \returns kUnsupported if
/// there is no device, driver or code for the device; else kDevice.
inline base::Status check_cuda(std::string_view operation, cudaError_t error) {
  if (error == cudaSuccess) return base::Status::ok();
  cudaGetLastError();  // clears it, or the next check of a launch would find it
  const bool absent = error == cudaErrorNoDevice || error == cudaErrorInsufficientDriver ||
                      error == cudaErrorInvalidDevice || error == cudaErrorNoKernelImageForDevice ||
                      error == cudaErrorInvalidDeviceFunction || error == cudaErrorStubLibrary;
  return base::Status::make(absent ? base::Code::kUnsupported : base::Code::kDevice,
                            base::text(operation, ": ", cudaGetErrorString(error), " (", cudaGetErrorName(error), ")"));
}

// Errors of destroying are ignored: they only happen after a fault of the device, or at the end of the process, when
// the driver is gone.
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

/// Makes a stream that does not wait for other streams, not even for the legacy default stream.
inline base::Status make_stream(Stream* stream) {
  cudaStream_t made = nullptr;
  const cudaError_t error = cudaStreamCreateWithFlags(&made, cudaStreamNonBlocking);
  if (error == cudaSuccess) stream->reset(made);
  return check_cuda("cudaStreamCreateWithFlags", error);
}

/// Makes an event. A host thread that waits for it sleeps, so that it does not take a processor from the input
/// pipeline.
inline base::Status make_event(Event* event) {
  cudaEvent_t made = nullptr;
  const cudaError_t error = cudaEventCreateWithFlags(&made, cudaEventDisableTiming | cudaEventBlockingSync);
  if (error == cudaSuccess) event->reset(made);
  return check_cuda("cudaEventCreateWithFlags", error);
}

inline base::Status record(const Event& event, cudaStream_t stream) {
  return check_cuda("cudaEventRecord", cudaEventRecord(event.get(), stream));
}

/// Makes all work that is enqueued on `stream` from now on wait for the last `record` of `event`.
inline base::Status wait_for(const Event& event, cudaStream_t stream) {
  return check_cuda("cudaStreamWaitEvent", cudaStreamWaitEvent(stream, event.get(), 0));
}

}  // namespace bytecheckpoint::staging
