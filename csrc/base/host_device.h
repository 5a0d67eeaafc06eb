// SPDX-License-Identifier: Apache-2.0
#pragma once

/// Marks a function that kernels call too. What is marked uses no more of the standard library than types, so that the
/// very lines that run on a device are tested without one.
#if defined(__CUDACC__)
#define BCP_HOST_DEVICE __host__ __device__
#else
#define BCP_HOST_DEVICE
#endif
