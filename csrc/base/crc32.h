// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

namespace bytecheckpoint::base {

/// CRC-32 with the gzip/zip polynomial (0xEDB88320 reflected), so that one pass serves zip records and block tables.
///
/// `crc32(crc32(0, a), b)` is the CRC of a followed by b; equal to zlib's `crc32`. Runs on the fastest kernel that this
/// CPU has; all of them give the same result.
uint32_t crc32(uint32_t crc, const void* bytes, size_t size);

/// CRC of a followed by b, from CRC of a, CRC of b and the length of b. O(log length), no data needed.
///
/// Appending `length_b` bytes multiplies a's remainder by x^(8*length_b) modulo the polynomial; the powers
/// x^(2^k) are a table.
uint32_t crc32_combine(uint32_t crc_a, uint32_t crc_b, uint64_t length_b);

/// One way to compute it. `update` takes and returns the register, which is the CRC with all bits inverted.
struct Crc32Kernel {
  const char* name;
  uint32_t (*update)(uint32_t state, const uint8_t* bytes, size_t size);
};

/// The kernels that this CPU can run, the slowest first: `table` always, then what it has of `pclmul`, `vpclmul512`,
/// `arm`.
const std::vector<Crc32Kernel>& crc32_kernels();

}  // namespace bytecheckpoint::base
