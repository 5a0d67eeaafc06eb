// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>
#include <cstdint>

namespace bytecheckpoint::base {

/// CRC-32 with the gzip/zip polynomial (0xEDB88320 reflected), so that one pass serves zip records and block tables.
///
/// `crc32(crc32(0, a), b)` is the CRC of a followed by b; equal to zlib's `crc32`. `bytes` needs no alignment and may
/// be null if `size` is 0. Nothing outside [bytes, bytes + size) is read.
/// Thread-safe. The first call asks the CPU which of the kernels in crc32_kernels.h it can run, and keeps the fastest.
uint32_t crc32(uint32_t crc, const void* bytes, size_t size);

/// CRC of a followed by b, from CRC of a, CRC of b and the length of b. No data needed; the cost is one multiplication
/// for each non-zero byte of `length_b`, so a power of two costs one. Any length is valid, 2^64 - 1 included.
uint32_t crc32_combine(uint32_t crc_a, uint32_t crc_b, uint64_t length_b);

/// Name of the kernel behind `crc32` in this process: "avx512", "avx2", "pclmul", "arm_crc" or "table".
const char* crc32_kernel_name();

}  // namespace bytecheckpoint::base
