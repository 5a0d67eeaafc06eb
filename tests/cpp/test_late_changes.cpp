// SPDX-License-Identifier: Apache-2.0
#include "csrc/io/late_changes.h"

#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <chrono>
#include <string>

#include "csrc/io/file.h"
#include "csrc/io/file_system.h"
#include "csrc/io/hidden_files.h"
#include "tests/cpp/saved_checkpoint.h"
#include "tests/cpp/temp_dir.h"

namespace bytecheckpoint::io {
namespace {

using base::Status;

TEST_CASE("late changes: on a local file system nothing is asked twice") {
  const test::TempDir dir;
  REQUIRE(is_local(dir.path()));
  CHECK_FALSE(look_anew(dir.path()));
  CHECK_FALSE(look_anew(dir / "not/there/at/all"));
  int asked = 0;
  const auto begin = std::chrono::steady_clock::now();
  const Status outcome = ask_until_seen(dir / "absent", 60, [&] {
    ++asked;
    return Status::storage("open", dir / "absent", "read", ENOENT);
  });
  CHECK(outcome.sys_errno() == ENOENT);
  CHECK(asked == 1);
  CHECK(std::chrono::steady_clock::now() - begin < std::chrono::seconds(5));
}

TEST_CASE("late changes: names in a store, and file systems of the kernel, are not local") {
  CHECK_FALSE(look_anew("s3://bucket/run"));
  CHECK_FALSE(is_local("/proc"));
  CHECK_FALSE(is_local("/absent/path"));
}

TEST_CASE("late changes: where they are possible, it asks until it sees, fails otherwise, or the time is over") {
  const std::string elsewhere = "/proc/self";  // of no known kind
  int asked = 0;
  const auto third_time = [&]() -> Status {
    return ++asked < 3 ? Status::storage("open", elsewhere, "read", asked == 1 ? ESTALE : ENODATA) : Status::ok();
  };
  CHECK(ask_until_seen(elsewhere, 60, third_time).is_ok());
  CHECK(asked == 3);
  asked = 0;
  CHECK(ask_until_seen(elsewhere, 0, third_time).sys_errno() == ENODATA);
  CHECK(asked == 2);
  asked = 0;
  const Status refused = ask_until_seen(elsewhere, 60, [&] {
    ++asked;
    return Status::storage("open", elsewhere, "read", EACCES);
  });
  CHECK(refused.sys_errno() == EACCES);
  CHECK(asked == 1);
}

TEST_CASE("late changes: a file that ends early may be seen late; damage is not") {
  const test::TempDir dir;
  test::write_all(dir / "short", "0123456789");
  File file = test::value_of(File::open(dir.path(), "short", false));
  CHECK(may_be_late(file.read(5, 10).status()));
  CHECK_FALSE(may_be_late(Status::make(base::Code::kCorrupt, "checksum")));
  CHECK_FALSE(may_be_late(Status::ok()));
}

TEST_CASE("hidden files: names of NFS and FUSE, held for an hour after they got them") {
  const test::TempDir dir;
  CHECK(is_hidden_name(".nfs00000001"));
  CHECK(is_hidden_name(".fuse_hidden00000001"));
  CHECK_FALSE(is_hidden_name("nfs1"));
  CHECK_FALSE(is_hidden_name(".metadata"));
  test::write_all(dir / ".nfs1", "x");
  struct stat info;
  REQUIRE(::stat((dir / ".nfs1").c_str(), &info) == 0);
  CHECK(may_be_held(info));
  CHECK_FALSE(is_left_hidden(dir.path(), ".nfs1"));
  info.st_ctim.tv_sec -= 3700;
  CHECK_FALSE(may_be_held(info));
  CHECK_FALSE(is_left_hidden(dir.path(), ".nfs2"));
}

}  // namespace
}  // namespace bytecheckpoint::io
