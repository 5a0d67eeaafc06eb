// SPDX-License-Identifier: Apache-2.0
#include "csrc/io/memory_file.h"

#include <doctest/doctest.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <string>
#include <utility>
#include <vector>

#include "csrc/io/directory.h"
#include "csrc/io/file.h"
#include "tests/cpp/expect.h"
#include "tests/cpp/memory_holder.h"

using namespace bytecheckpoint;
using base::Code;

namespace {

io::File created(const std::string& name) {
  base::Result<io::File> file = io::File::create(io::join(test::kHeldUrl, name), /*direct=*/true);
  REQUIRE(file.is_ok());
  return std::move(file.value());
}

}  // namespace

TEST_CASE("memory file: it exists when it is synced or closed, and what was reserved beyond its end is given back") {
  const auto holder = test::registered_holder();
  for (const bool sync : {true, false}) {
    const std::string name = sync ? "step/a" : "step/b";
    io::File file = created(name);
    CHECK(file.on_disk() == nullptr);
    CHECK(file.takes_any_memory());
    REQUIRE(file.reserve(1 << 16).is_ok());
    REQUIRE(file.write_at("0123456789", 10, 0).is_ok());
    REQUIRE(file.write_at(std::vector<std::string_view>{"ab", "cd"}, 10).is_ok());
    REQUIRE(file.truncate(14).is_ok());
    CHECK(io::File::open(test::kHeldUrl, name, true).status().sys_errno() == ENOENT);
    if (sync) REQUIRE(file.sync().is_ok());
    REQUIRE(file.close().is_ok());
    base::Result<io::File> again = io::File::open(test::kHeldUrl, name, /*direct=*/true);
    REQUIRE(again.is_ok());
    CHECK(again.value().size().value() == 14);
    CHECK(again.value().read(8, 6).value() == "89abcd");
    CHECK(again.value().read(8, 7).status().code() == Code::kCorrupt);
    CHECK(again.value().version().value().bytes == 14);
  }
}

TEST_CASE("memory file: what is in spare memory is gone, and memory that is there need not be asked for") {
  const auto holder = test::registered_holder();
  holder->most_bytes = 0;
  holder->spare_fd = ::memfd_create("spare", MFD_CLOEXEC);
  REQUIRE(::write(holder->spare_fd, "older bytes", 11) == 11);
  const int spare = holder->spare_fd;
  io::File file = created("a");
  CHECK(holder->spare_fd == -1);
  CHECK(file.reserve(12).sys_errno() == ENOMEM);
  REQUIRE(file.reserve(11).is_ok());
  REQUIRE(file.write_at("new", 3, 0).is_ok());
  REQUIRE(file.truncate(3).is_ok());
  struct stat info;
  REQUIRE(::fstat(spare, &info) == 0);
  CHECK(info.st_size == 3);
  REQUIRE(file.close().is_ok());
  base::Result<io::File> again = io::File::open(test::kHeldUrl, "a", false);
  REQUIRE(again.is_ok());
  CHECK(again.value().read(0, 3).value() == "new");
  CHECK(again.value().size().value() == 3);
  CHECK(again.value().write_at("x", 1, 0).sys_errno() == EBADF);
}

TEST_CASE("memory file: what is reserved can be filled in its place, also where spare memory is shorter or longer") {
  for (const int64_t spare_bytes : {int64_t{0}, int64_t{5000}, int64_t{1} << 20}) {
    CAPTURE(spare_bytes);
    const auto holder = test::registered_holder();
    if (spare_bytes > 0) {
      holder->spare_fd = ::memfd_create("spare", MFD_CLOEXEC);
      REQUIRE(::ftruncate(holder->spare_fd, spare_bytes) == 0);
    }
    io::File file = created("a");
    CHECK(file.memory(0, 1) == nullptr);  // before it is reserved
    REQUIRE(file.reserve(10'000).is_ok());
    uint8_t* const first = file.memory(0, 10'000);
    REQUIRE(first != nullptr);
    CHECK(file.memory(9'999, 1) == first + 9'999);
    CHECK(file.memory(9'999, 1 << 20) == nullptr);  // beyond what is mapped
    std::fill(first, first + 10'000, uint8_t{'m'});
    REQUIRE(file.write_at("written", 7, 10'000).is_ok());
    REQUIRE(file.truncate(10'007).is_ok());
    REQUIRE(file.close().is_ok());
    base::Result<io::File> again = io::File::open(test::kHeldUrl, "a", false);
    REQUIRE(again.is_ok());
    CHECK(again.value().memory(0, 1) == nullptr);  // of others it is for reading
    CHECK(again.value().size().value() == 10'007);
    CHECK(again.value().read(9'998, 9).value() == "mmwritten");
  }
}

TEST_CASE("memory file: a forked child leaves the memory to its parent") {
  const auto holder = test::registered_holder();
  auto file = std::make_unique<io::File>(created("a"));
  REQUIRE(file->reserve(4096).is_ok());
  const pid_t child = ::fork();
  if (child == 0) {
    file.reset();
    ::_exit(0);
  }
  int status = -1;
  REQUIRE(::waitpid(child, &status, 0) == child);
  CHECK(status == 0);
  *file->memory(0, 1) = 'm';
  REQUIRE(file->truncate(1).is_ok());
  REQUIRE(file->close().is_ok());
  CHECK(io::read_file(test::kHeldUrl, "a").value() == "m");
}

TEST_CASE("memory file: one that is not finished leaves nothing") {
  const auto holder = test::registered_holder();
  {
    const io::File file = created("a");
  }
  CHECK(io::File::open(test::kHeldUrl, "a", false).status().sys_errno() == ENOENT);
}

TEST_CASE("memory file: what does not fit is refused, and a name may not lead out") {
  const auto holder = test::registered_holder();
  holder->most_bytes = 100;
  io::File file = created("a");
  CHECK(file.reserve(101).sys_errno() == ENOMEM);
  CHECK(file.reserve(100).is_ok());
  for (const char* name : {"../a", "/a", "", "b/../../a"}) {
    CHECK(io::File::open(test::kHeldUrl, name, false).status().code() == Code::kCorrupt);
  }
  CHECK(io::File::create("held://nobody/a", false).status().code() == Code::kUnsupported);
}
