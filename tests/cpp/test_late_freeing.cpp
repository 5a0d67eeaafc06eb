// SPDX-License-Identifier: Apache-2.0
#include "csrc/io/late_freeing.h"

#include <sys/stat.h>
#include <sys/statvfs.h>
#include <sys/wait.h>
#include <unistd.h>

#include <fstream>
#include <sstream>
#include <string>

#include "csrc/io/file.h"
#include "csrc/io/file_system.h"
#include "tests/cpp/aligned_bytes.h"
#include "tests/cpp/expect.h"
#include "tests/cpp/saved_checkpoint.h"
#include "tests/cpp/temp_dir.h"

namespace bytecheckpoint::io {
namespace {

using test::TempDir;

constexpr int64_t kLarge = 64 << 20;

void write_large(const std::string& path) {
  File file = test::value_of(File::create(path, /*direct=*/false));
  const auto bytes = test::aligned_bytes(kLarge);
  EXPECT_OK(file.write_at(bytes.get(), kLarge, 0));
  EXPECT_OK(file.close());
}

/// Whether a file of that directory is mapped in this process, with or without a name.
bool is_any_mapped(const std::string& directory) {
  std::ifstream maps("/proc/self/maps");
  std::ostringstream text;
  text << maps.rdbuf();
  return text.str().find(directory) != std::string::npos;
}

TEST_CASE("late_freeing: a large file has lost its name at once, and its space soon") {
  for (const char* root : {static_cast<const char*>(nullptr), test::memory_root()}) {
    const TempDir dir(root);
    write_large(dir / "a");
    write_large(dir / "b");
    EXPECT_OK(remove_and_free_later(dir / "a"));
    CHECK(dir.names() == std::vector<std::string>{"b"});
    EXPECT_OK(remove_and_free_later(dir / "b"));
    CHECK(dir.names().empty());
    wait_until_freed();
    CHECK_FALSE(is_any_mapped(dir.path()));
  }
}

TEST_CASE("late_freeing: the space of a file in memory is free when nothing is left to be freed") {
  const char* const root = test::memory_root();
  if (root == nullptr || !is_in_memory(root)) return;
  const auto free_bytes = [root] {
    struct statvfs about{};
    REQUIRE(::statvfs(root, &about) == 0);
    return static_cast<int64_t>(about.f_bfree * about.f_frsize);
  };
  const TempDir dir(root);
  write_large(dir / "a");
  const int64_t before = free_bytes();
  EXPECT_OK(remove_and_free_later(dir / "a"));
  wait_until_freed();
  CHECK(free_bytes() - before > kLarge / 2);  // others may use this file system, too
}

TEST_CASE("late_freeing: forked children keep no space") {
  const TempDir dir(test::memory_root());
  for (int round = 0; round < 5; ++round) {
    write_large(dir / "a");
    EXPECT_OK(remove_and_free_later(dir / "a"));
    const pid_t child = ::fork();
    if (child == 0) ::_exit(is_any_mapped(dir.path()) ? 1 : 0);
    int status = 0;
    REQUIRE(::waitpid(child, &status, 0) == child);
    CHECK(status == 0);
  }
  wait_until_freed();
}

TEST_CASE("late_freeing: a save begins when what was swept before is free") {
  const TempDir dir;
  write_large(dir / "a");
  EXPECT_OK(remove_and_free_later(dir / "a"));
  const auto commit = test::value_of(engine::Commit::begin(test::commit_options(dir / "checkpoint", 1)));
  CHECK_FALSE(is_any_mapped(dir.path()));
}

TEST_CASE("late_freeing: small files, other names of a file, links and nothing are removed as ever") {
  const TempDir dir;
  test::write_all(dir / "small", "content");
  EXPECT_OK(remove_and_free_later(dir / "small"));
  write_large(dir / "a");
  REQUIRE(::link((dir / "a").c_str(), (dir / "b").c_str()) == 0);
  EXPECT_OK(remove_and_free_later(dir / "a"));
  REQUIRE(::symlink((dir / "b").c_str(), (dir / "link").c_str()) == 0);
  EXPECT_OK(remove_and_free_later(dir / "link"));
  REQUIRE(::mkfifo((dir / "fifo").c_str(), 0600) == 0);
  EXPECT_OK(remove_and_free_later(dir / "fifo"));
  EXPECT_OK(remove_and_free_later(dir / "absent"));
  CHECK_FALSE(is_any_mapped(dir.path()));
  CHECK(dir.names() == std::vector<std::string>{"b"});
  EXPECT_FAILURE(kStorage, "unlink(" + dir.path(), remove_and_free_later(dir.path()));
}

}  // namespace
}  // namespace bytecheckpoint::io
