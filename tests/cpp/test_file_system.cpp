// SPDX-License-Identifier: Apache-2.0
#include "csrc/io/file_system.h"

#include "tests/cpp/expect.h"

namespace bytecheckpoint::io {
namespace {

TEST_CASE("file_system: a path that is not there, and one of the kernel's own, are not in memory of ours") {
  CHECK_FALSE(is_in_memory("/no such path"));
  CHECK_FALSE(is_in_memory("/proc/self"));
}

}  // namespace
}  // namespace bytecheckpoint::io
