// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>
#include <cstdint>

namespace bytecheckpoint::base {

/// CRC-32 with the gzip/zip polynomial (0xEDB88320 reflected), so that one pass serves zip records and block tables.
///
/// `crc32(crc32(0, a), b)` is the CRC of a followed by b; equal to zlib's `crc32`.
/// Source: slicing-by-N tables, Kounavis & Berry, "Novel Table Lookup-Based Algorithms for High-Performance CRC
/// Generation" (IEEE ToC 2008); 16 bytes a step here.
uint32_t crc32(uint32_t crc, const void* bytes, size_t size);

/// CRC of a followed by b, from CRC of a, CRC of b and the length of b. O(log length), no data needed.
///
/// Appending `length_b` bytes multiplies a's remainder by x^(8*length_b) modulo the polynomial; the powers
/// x^(2^k) are a table.
uint32_t crc32_combine(uint32_t crc_a, uint32_t crc_b, uint64_t length_b);

}  // namespace bytecheckpoint::base
