// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

namespace bytecheckpoint::base {

/// One way to compute `crc32`. All give the same number for the same arguments; only their speed differs.
struct Crc32Kernel {
  const char* name;  // a literal
  uint32_t (*update)(uint32_t crc, const void* bytes, size_t size);
};

/// The kernels which this CPU and this operating system can run, fastest first; the last is always "table".
///
/// Code for all of them is compiled in, whatever the compiler's flags: each function names its own instruction set, and
/// calling one that is not in this list is undefined.
std::vector<Crc32Kernel> crc32_kernels();

/// Slicing by 16: a look-up for each byte, 16 at a time. Runs anywhere; small inputs of the other kernels end here.
///
/// Source: Kounavis & Berry, "Novel Table Lookup-Based Algorithms for High-Performance CRC Generation" (IEEE ToC 2008).
uint32_t crc32_table(uint32_t crc, const void* bytes, size_t size);

/// Adds the carry-less multiplication kernels to `kernels`, fastest first; none where the code is not for x86-64.
void add_crc32_x86_kernels(std::vector<Crc32Kernel>* kernels);

/// Adds the kernel of the CRC32 instructions to `kernels`; none where the code is not for AArch64 Linux.
void add_crc32_arm_kernels(std::vector<Crc32Kernel>* kernels);

}  // namespace bytecheckpoint::base
