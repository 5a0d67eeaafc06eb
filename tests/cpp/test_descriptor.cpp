// SPDX-License-Identifier: Apache-2.0
#include "csrc/io/descriptor.h"

#include <fcntl.h>
#include <unistd.h>

#include "tests/cpp/expect.h"
#include "tests/cpp/temp_dir.h"

namespace bytecheckpoint::io {
namespace {

using test::TempDir;

Descriptor opened(const std::string& path) {
  return {open_retrying(path.c_str(), O_RDWR | O_CREAT, 0600), path, /*direct=*/false};
}

TEST_CASE("descriptor: direct I/O is ended once, and one descriptor is left on a file system of the kernel") {
  const TempDir dir;
  Descriptor file = opened(dir / "a");
  EXPECT_OK(file.stop_direct());  // nothing to end
  file.start_direct();
  const bool has_direct = file.is_direct();
  CHECK(((::fcntl(file.fd(), F_GETFL) & O_DIRECT) != 0) == has_direct);
  EXPECT_OK(file.stop_direct());
  CHECK_FALSE(file.is_direct());
  CHECK((::fcntl(file.fd(), F_GETFL) & O_DIRECT) == 0);
  CHECK(file.for_transfer(true) == file.fd());
  CHECK(file.for_transfer(false) == file.fd());
  file.forget_direct();
  CHECK(file.is_open());
}

TEST_CASE("descriptor: a closed or disowned file has nothing to sync, flush or close") {
  const TempDir dir;
  Descriptor file = opened(dir / "a");
  const int fd = file.fd();
  EXPECT_OK(file.sync());
  file.disown();
  CHECK(::fcntl(fd, F_GETFD) != -1);
  ::close(fd);
  CHECK_FALSE(file.is_open());
  EXPECT_OK(file.sync());
  EXPECT_OK(file.flush());
  EXPECT_OK(file.close());
  file.start_direct();
  CHECK_FALSE(file.is_direct());
}

}  // namespace
}  // namespace bytecheckpoint::io
