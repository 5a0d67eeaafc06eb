// SPDX-License-Identifier: Apache-2.0
#include "csrc/base/read_only_memory.h"

#include <sys/mman.h>
#include <unistd.h>

#include "tests/cpp/expect.h"

namespace bytecheckpoint::base {
namespace {

const void* at(uintptr_t address) {
  return reinterpret_cast<const void*>(address);
}

TEST_CASE("read-only memory: ranges of a list") {
  ReadOnlyMemory memory(
      "1000-3000 r--p 00000000 08:01 17 /lib/a b.so\n"
      "3000-4000 rw-p 00002000 08:01 17 /lib/a b.so\n"
      "5000-6000 ---p 00000000 00:00 0\n"
      "7000-8000 r-xs 00000000 00:00 0 [vdso]\n"
      "not a line\n"
      "9000");
  CHECK(memory.has(at(0x1000), 1));
  CHECK(memory.has(at(0xfff), 2));
  CHECK_FALSE(memory.has(at(0xfff), 1));
  CHECK(memory.has(at(0x2fff), 1));
  CHECK_FALSE(memory.has(at(0x3000), 0x1000));
  CHECK_FALSE(memory.has(at(0x5000), 0x1000));
  CHECK(memory.has(at(0x3000), 0x4001));
  CHECK(memory.has(at(0x7fff), 1));
  CHECK_FALSE(memory.has(at(0x8000), 0x10000));
  CHECK_FALSE(memory.has(at(0x1800), 0));
  CHECK_FALSE(ReadOnlyMemory("").has(at(0x1000), 1));
}

TEST_CASE("read-only memory: what this process has mapped") {
  const auto page = static_cast<size_t>(::sysconf(_SC_PAGESIZE));
  void* const memory = ::mmap(nullptr, 3 * page, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  REQUIRE(memory != MAP_FAILED);
  auto* const first = static_cast<uint8_t*>(memory);
  CHECK_FALSE(ReadOnlyMemory().has(first, 3 * page));
  REQUIRE(::mprotect(first + page, page, PROT_READ) == 0);
  ReadOnlyMemory now;
  CHECK(now.has(first, 3 * page));
  CHECK_FALSE(now.has(first, page));
  CHECK(now.has(first + page, 1));
  CHECK_FALSE(now.has(first + 2 * page, page));
  ::munmap(memory, 3 * page);
}

}  // namespace
}  // namespace bytecheckpoint::base
