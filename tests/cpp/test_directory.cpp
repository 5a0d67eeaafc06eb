// SPDX-License-Identifier: Apache-2.0
#include "csrc/io/directory.h"

#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <string>
#include <thread>
#include <vector>

#include "tests/cpp/expect.h"
#include "tests/cpp/temp_dir.h"

namespace bytecheckpoint::io {
namespace {

using test::TempDir;

TEST_CASE("directory: join") {
  CHECK(join("a", "b") == "a/b");
  CHECK(join("a/", "b") == "a/b");
  CHECK(join("/", "b") == "/b");
}

TEST_CASE("directory: an entry's type is that of its name") {
  const TempDir dir;
  CHECK((test::value_of(entry_type(dir / "a")) == EntryType::kAbsent));
  test::write_all(dir / "a", "");
  CHECK((test::value_of(entry_type(dir / "a")) == EntryType::kRegular));
  CHECK((test::value_of(entry_type(dir.path())) == EntryType::kDirectory));
  REQUIRE(::symlink("a", (dir / "link").c_str()) == 0);
  CHECK((test::value_of(entry_type(dir / "link")) == EntryType::kOther));
  CHECK(entry_type(dir / "a/b").status().sys_errno() == ENOTDIR);
}

TEST_CASE("directory: missing parents are made, what is there is fine") {
  const TempDir dir;
  for (const bool sync : {false, true}) {
    const std::string root = dir / (sync ? "synced" : "plain");
    EXPECT_OK(make_directories(root + "/b/c", sync));
    EXPECT_OK(make_directories(root + "/b/c", sync));
    EXPECT_OK(make_directories(root + "/b/d//", sync));
    EXPECT_OK(make_directories(root + "//e", sync));
    CHECK((test::value_of(entry_type(root + "/b/d")) == EntryType::kDirectory));
    CHECK((test::value_of(entry_type(root + "/e")) == EntryType::kDirectory));
  }
  EXPECT_OK(make_directories("/", true));
}

TEST_CASE("directory: a file in the way is told by its path") {
  const TempDir dir;
  test::write_all(dir / "a", "");
  CHECK(make_directories(dir / "a", true).sys_errno() == ENOTDIR);
  CHECK(make_directories(dir / "a/b", true).sys_errno() == ENOTDIR);
  REQUIRE(::symlink("nowhere", (dir / "link").c_str()) == 0);
  CHECK_FALSE(make_directories(dir / "link/b", false).is_ok());
}

TEST_CASE("directory: a symbolic link to a directory is a directory") {
  const TempDir dir;
  EXPECT_OK(make_directories(dir / "real", false));
  REQUIRE(::symlink("real", (dir / "link").c_str()) == 0);
  EXPECT_OK(make_directories(dir / "link/sub", true));
  CHECK((test::value_of(entry_type(dir / "real/sub")) == EntryType::kDirectory));
}

TEST_CASE("directory: ranks may make the same directories at the same time") {
  const TempDir dir;
  std::vector<base::Status> outcomes(4);
  std::vector<std::thread> threads;
  for (base::Status& outcome : outcomes) {
    threads.emplace_back([&] { outcome = make_directories(dir / "a/b/c/d", true); });
  }
  for (std::thread& thread : threads) thread.join();
  for (const base::Status& outcome : outcomes) EXPECT_OK(outcome);
}

TEST_CASE("directory: says which it has made, of which those that are empty can be removed") {
  const TempDir dir;
  std::vector<std::string> made;
  EXPECT_OK(make_directories(dir / "a", false));
  EXPECT_OK(make_directories(dir / "a/b/c/", true, &made));
  CHECK(made == std::vector<std::string>{dir / "a/b", dir / "a/b/c/"});
  test::write_all(dir / "a/b/file", "");
  remove_empty_directories(made);
  CHECK_FALSE(dir.has("a/b/c"));
  remove_empty_directories(made);
  CHECK(dir.has("a/b/file"));
  test::write_all(dir / "a/b/.fuse_hidden0001", "");  // FUSE hears of the last close late
  std::thread closing([&] {
    std::this_thread::sleep_for(std::chrono::milliseconds(50));
    EXPECT_OK(remove_file(dir / "a/b/.fuse_hidden0001"));
  });
  EXPECT_OK(remove_file(dir / "a/b/file"));
  remove_empty_directories({dir / "a/b"});
  closing.join();
  CHECK_FALSE(dir.has("a/b"));
  made.clear();
  test::write_all(dir / "a/file", "");
  EXPECT_FAILURE(kStorage, "file", make_directories(dir / "a/file/c", false, &made));
  CHECK(made.empty());
}

TEST_CASE("directory: a listing has every name but the two dots") {
  const TempDir dir;
  CHECK(test::value_of(list_directory(dir.path())).empty());
  for (const char* name : {".metadata", "a", "..b"}) test::write_all(dir / name, "");
  std::vector<std::string> names = test::value_of(list_directory(dir.path()));
  std::sort(names.begin(), names.end());
  CHECK(names == std::vector<std::string>{"..b", ".metadata", "a"});
  CHECK(list_directory(dir / "absent").status().sys_errno() == ENOENT);
  CHECK(list_directory(dir / "a").status().sys_errno() == ENOTDIR);
}

TEST_CASE("directory: synced, or told why not") {
  const TempDir dir;
  bool supported = false;
  EXPECT_OK(sync_directory(dir.path(), &supported));
  CHECK(supported);
  CHECK(sync_directory(dir / "absent").sys_errno() == ENOENT);
}

TEST_CASE("directory: a rename replaces what is there, or refuses to") {
  const TempDir dir;
  test::write_all(dir / "a", "1");
  EXPECT_OK(rename_new(dir / "a", dir / "b"));
  CHECK(dir.names() == std::vector<std::string>{"b"});
  test::write_all(dir / "a", "2");
  const base::Status refused = rename_new(dir / "a", dir / "b");
  CHECK(refused.sys_errno() == EEXIST);
  CHECK(test::contains(refused.message(), "rename(" + (dir / "a") + ", to " + (dir / "b") + ")"));
  CHECK(test::read_all(dir / "b") == "1");
  EXPECT_OK(rename_over(dir / "a", dir / "b"));
  CHECK(dir.names() == std::vector<std::string>{"b"});
  CHECK(test::read_all(dir / "b") == "2");
  CHECK(rename_over(dir / "a", dir / "b").sys_errno() == ENOENT);
  CHECK(rename_new(dir / "a", dir / "c").sys_errno() == ENOENT);
}

TEST_CASE("directory: removing what is gone is fine, a directory is not removed") {
  const TempDir dir;
  test::write_all(dir / "a", "");
  EXPECT_OK(remove_file(dir / "a"));
  EXPECT_OK(remove_file(dir / "a"));
  EXPECT_OK(make_directories(dir / "sub", false));
  CHECK_FALSE(remove_file(dir / "sub").is_ok());
  CHECK(dir.has("sub"));
}

}  // namespace
}  // namespace bytecheckpoint::io
