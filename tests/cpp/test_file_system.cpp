// SPDX-License-Identifier: Apache-2.0
#include "csrc/io/file_system.h"

#include <cerrno>

#include "tests/cpp/expect.h"
#include "tests/cpp/temp_dir.h"

namespace bytecheckpoint::io {
namespace {

TEST_CASE("file_system: a path that is not there, and one of the kernel's own, are not in memory of ours") {
  CHECK_FALSE(is_in_memory("/no such path"));
  CHECK_FALSE(is_in_memory("/proc/self"));
  CHECK_FALSE(test::value_of(is_in_memory("/proc/self", 60)));
  if (is_in_memory("/dev/shm")) CHECK(test::value_of(is_in_memory("/dev/shm", 60)));
}

TEST_CASE("file_system: what is wanted is compared with what is free, where anything is counted") {
  const test::TempDir dir;
  EXPECT_OK(check_room(dir.path(), 0));
  EXPECT_OK(check_room(dir.path(), 1));
  const base::Status full = check_room(dir.path(), int64_t{1} << 60);
  EXPECT_FAILURE(kStorage, "1152921504606846976 bytes needed", full);
  CHECK(full.sys_errno() == ENOSPC);
  CHECK(full.path() == dir.path());
  EXPECT_OK(check_room("/proc", int64_t{1} << 60));
  EXPECT_OK(check_room("/no such path", int64_t{1} << 60));
}

}  // namespace
}  // namespace bytecheckpoint::io
