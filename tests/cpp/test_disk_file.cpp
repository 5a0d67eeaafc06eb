// SPDX-License-Identifier: Apache-2.0
#include "csrc/io/disk_file.h"

#include <fcntl.h>
#include <sys/file.h>
#include <unistd.h>

#include <cerrno>
#include <string>
#include <string_view>
#include <utility>

#include "tests/cpp/aligned_bytes.h"
#include "tests/cpp/expect.h"
#include "tests/cpp/file_size_limit.h"
#include "tests/cpp/temp_dir.h"

namespace bytecheckpoint::io {
namespace {

using base::Status;
using test::TempDir;

DiskFile created(const std::string& path, bool direct = false) {
  return test::value_of(DiskFile::create(path, direct));
}

TEST_CASE("disk file: bytes that are written past the cache are read, wherever they lie in memory") {
  for (const int64_t size : {0, 1, 4096, 12345, (4 << 20) - 1, 4 << 20, (8 << 20) + 4097}) {
    for (const size_t shift : {0, 1}) {
      for (const int64_t offset : {0, 4096, 7}) {
        CAPTURE(size);
        CAPTURE(shift);
        CAPTURE(offset);
        const TempDir dir;
        const std::string content = test::patterned(size), in_memory = std::string(shift, 'x') + content;
        DiskFile file = created(dir / "a");
        EXPECT_OK(file.write_past_cache(std::string_view(in_memory).substr(shift), offset));
        // The file may be written in other ways afterwards.
        EXPECT_OK(file.write_at("end", 3, offset + size));
        CHECK((test::read_all(dir / "a") == std::string(static_cast<size_t>(offset), '\0') + content + "end"));
      }
    }
  }
}

TEST_CASE("disk file: bytes that are written past the cache and find no room are refused with what is missing") {
  const TempDir dir;
  DiskFile file = created(dir / "a");
  const std::string content = test::patterned(6 << 20);
  Status status = Status::ok();
  {
    const test::FileSizeLimit limit(5 << 20);  // not while doctest writes, maybe to a file
    status = file.write_past_cache(content, 0);
  }
  CHECK(status.sys_errno() == EFBIG);
  CHECK(status.message().find("pwrite(" + (dir / "a") + ", offset=5242880, 1048576 bytes)") == 0);
  CHECK((test::read_all(dir / "a") == content.substr(0, 5 << 20)));
}

TEST_CASE("disk file: moved, the descriptor has one owner; closed, it is gone") {
  const TempDir dir;
  DiskFile first = created(dir / "a");
  const int fd = first.fd();
  DiskFile second = std::move(first);
  CHECK_FALSE(first.is_open());  // NOLINT: the moved-from state is what is tested
  CHECK(second.fd() == fd);
  second = created(dir / "b");
  CHECK(::fcntl(fd, F_GETFD) == -1);
  EXPECT_OK(second.close());
  EXPECT_OK(second.close());
  CHECK_FALSE(second.is_open());
}

TEST_CASE("disk file: flushed, it is still open, and keeps its lock") {
  const TempDir dir;
  DiskFile file = created(dir / "a");
  REQUIRE(::flock(file.fd(), LOCK_EX) == 0);
  EXPECT_OK(file.write_at("abc", 3, 0));
  EXPECT_OK(file.flush());
  const DiskFile other = test::value_of(DiskFile::open(dir.path(), "a", false));
  CHECK(::flock(other.fd(), LOCK_EX | LOCK_NB) == -1);
  EXPECT_OK(file.write_at("d", 1, 3));
  CHECK(test::read_all(dir / "a") == "abcd");
}

}  // namespace
}  // namespace bytecheckpoint::io
