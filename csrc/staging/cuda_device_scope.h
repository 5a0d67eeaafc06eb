// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cuda.h>  // only its types: functions are looked up at run time, so that nothing links the driver
#include <cuda_runtime.h>

#include <type_traits>

#include "csrc/staging/cuda_handles.h"

namespace bytecheckpoint::staging {

/// The functions of the CUDA driver that read and set the context of a thread.
struct ContextFunctions {
  CUresult (*get)(CUcontext*) = nullptr;
  CUresult (*set)(CUcontext) = nullptr;
  cudaError_t error = cudaSuccess;  // why they are null

  /// Looked up once, at the first use; without a driver the functions stay null. It has no destructor, because it is
  /// used until the process ends.
  static const ContextFunctions& of_process() {
    static const ContextFunctions functions = find();
    return functions;
  }

 private:
  static ContextFunctions find() {
    void* get = nullptr;
    void* set = nullptr;
    cudaError_t error = look_up("cuCtxGetCurrent", &get);
    if (error == cudaSuccess) error = look_up("cuCtxSetCurrent", &set);
    if (error != cudaSuccess) return {nullptr, nullptr, error};
    return {reinterpret_cast<CUresult (*)(CUcontext*)>(get), reinterpret_cast<CUresult (*)(CUcontext)>(set), error};
  }
  static cudaError_t look_up(const char* name, void** function) {
    cudaDriverEntryPointQueryResult result = cudaDriverEntryPointSuccess;
#if CUDART_VERSION >= 12050
    constexpr unsigned int kSince = 4000;  // CUDA 4.0: the oldest form of both
    const cudaError_t error = cudaGetDriverEntryPointByVersion(name, function, kSince, cudaEnableDefault, &result);
#else
    const cudaError_t error = cudaGetDriverEntryPoint(name, function, cudaEnableDefault, &result);
#endif
    if (error != cudaSuccess) return error;
    return result == cudaDriverEntryPointSuccess && *function != nullptr ? cudaSuccess : cudaErrorSymbolNotFound;
  }
};
static_assert(std::is_trivially_destructible_v<ContextFunctions>);

/// Makes a device current in the calling thread. The destructor makes current again what was current before.
///
/// Meanwhile another thread may capture a CUDA graph. CUDA then refuses calls like cudaMalloc and cudaEventQuery in all
/// threads, and the capture fails too, except in threads that declare that their calls are not related to it. Ours
/// never are, so the scope declares that.
///
/// It restores the context through the driver. A thread that never used CUDA has no context. Setting its device back by
/// number would create one on device 0, where every rank of a machine would then hold hundreds of MiB.
class DeviceScope {
 public:
  explicit DeviceScope(int device)
      : functions_(ContextFunctions::of_process()), status_(check_cuda("finding the CUDA driver", functions_.error)) {
    if (!status_.is_ok()) return;
    if (functions_.get(&before_) != CUDA_SUCCESS) before_ = nullptr;  // CUDA is not initialized yet
    status_ = check_cuda(base::text("cudaSetDevice(", device, ")"), cudaSetDevice(device));
    if (!status_.is_ok()) return;
    // Behind it: in a thread that never used CUDA, this would make a context on device 0.
    status_ = check_cuda("cudaThreadExchangeStreamCaptureMode", cudaThreadExchangeStreamCaptureMode(&capture_mode_));
    has_exchanged_ = status_.is_ok();
  }
  ~DeviceScope() {
    if (has_exchanged_) static_cast<void>(cudaThreadExchangeStreamCaptureMode(&capture_mode_));
    if (functions_.set != nullptr) static_cast<void>(functions_.set(before_));
  }
  DeviceScope(const DeviceScope&) = delete;
  DeviceScope& operator=(const DeviceScope&) = delete;

  /// The error if the device could not be made current.
  const base::Status& status() const { return status_; }

 private:
  const ContextFunctions& functions_;
  base::Status status_;
  CUcontext before_ = nullptr;
  cudaStreamCaptureMode capture_mode_ = cudaStreamCaptureModeRelaxed;  // the one to set next
  bool has_exchanged_ = false;
};

}  // namespace bytecheckpoint::staging
