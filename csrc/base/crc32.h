// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>
#include <cstdint>

namespace bytecheckpoint::base {

/// Continues the CRC-32 `crc` over `size` more bytes. The first call of a sequence gets 0: `crc32(crc32(0, a), b)` is
/// the CRC of a followed by b.
///
/// The polynomial is that of gzip and zip (0xEDB88320 reflected), and the result equals that of zlib's `crc32`. So one
/// pass over the data serves both zip records and block tables.
///
/// \param bytes  Needs no alignment; may be null if `size` is 0. Nothing outside [bytes, bytes + size) is read.
/// Thread-safe. The first call in a process asks the CPU which of the kernels in crc32_kernels.h it can run, and
/// selects the fastest one for all later calls.
uint32_t crc32(uint32_t crc, const void* bytes, size_t size);

/// Returns the CRC of a followed by b, computed from the CRC of a, the CRC of b and the length of b in bytes, without
/// the data.
///
/// Costs one multiplication for each non-zero byte of `length_b`, so one for a power of two. Any length is valid, up to
/// UINT64_MAX. Pure; thread-safe.
uint32_t crc32_combine(uint32_t crc_a, uint32_t crc_b, uint64_t length_b);

/// Returns the CRC of a, computed from the CRC of a followed by b, the CRC of b and the length of b in bytes: the
/// reverse of `crc32_combine`. Pure; thread-safe.
uint32_t crc32_without_end(uint32_t crc_a_b, uint32_t crc_b, uint64_t length_b);

/// Returns the name of the kernel that `crc32` uses in this process: "avx512", "avx2", "pclmul", "arm_crc" or "table".
const char* crc32_kernel_name();

}  // namespace bytecheckpoint::base
