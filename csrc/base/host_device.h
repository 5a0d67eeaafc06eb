// SPDX-License-Identifier: Apache-2.0
#pragma once

/// Marks a function that CUDA kernels call, too. Such a function uses nothing of the standard library but types, so
/// that tests without a device run the very lines that run on one.
#if defined(__CUDACC__)
#define BCP_HOST_DEVICE __host__ __device__
#else
#define BCP_HOST_DEVICE
#endif
