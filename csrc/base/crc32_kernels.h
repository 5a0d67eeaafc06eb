// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

namespace bytecheckpoint::base {

/// One implementation of `crc32`. All kernels return the same number for the same arguments; only their speed differs.
struct Crc32Kernel {
  const char* name;  // a string literal
  uint32_t (*update)(uint32_t crc, const void* bytes, size_t size);
};

/// Returns the kernels that this CPU and this operating system can run, fastest first; the last one is always "table".
///
/// All kernels are compiled in, whatever the compiler's flags are, because each function names its own instruction set.
/// Calling a kernel that is not in this list is undefined behaviour.
std::vector<Crc32Kernel> crc32_kernels();

/// The kernel "table": slicing by 16, which looks up a table once per byte and handles 16 bytes at a time. It runs on
/// any CPU. Other kernels use it for inputs that are too small for them.
uint32_t crc32_table(uint32_t crc, const void* bytes, size_t size);

/// Appends the carry-less multiplication kernels that this CPU can run, fastest first. Appends none on other
/// architectures than x86-64.
void add_crc32_x86_kernels(std::vector<Crc32Kernel>* kernels);

/// Appends the kernel of the CRC32 instructions if this CPU can run it. Appends none on other systems than AArch64
/// Linux.
void add_crc32_arm_kernels(std::vector<Crc32Kernel>* kernels);

}  // namespace bytecheckpoint::base
