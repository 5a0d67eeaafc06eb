// SPDX-License-Identifier: Apache-2.0
#include "csrc/io/remove_entry.h"

#include <dirent.h>
#include <sys/stat.h>
#include <unistd.h>

#include <filesystem>
#include <set>
#include <string>

#include "csrc/io/open_directory.h"
#include "tests/cpp/expect.h"
#include "tests/cpp/temp_dir.h"

namespace bytecheckpoint::io {
namespace {

namespace fs = std::filesystem;

using base::Status;
using test::TempDir;

/// Rules that allow every removal, unless a test changes them.
RemovalRules rules() {
  return {[](const std::string& name) { return name == "mark"; }, [] { return Status::ok(); }, false};
}

/// Makes `top`, with files of 10 bytes in it, in `top/mid` and in `top/mid/low`.
void make_tree(const std::string& top) {
  fs::create_directories(top + "/mid/low");
  fs::create_directories(top + "/empty");
  for (const char* name : {"/a", "/z", "/mid/b", "/mid/low/c"}) test::write_all(top + name, "0123456789");
}

std::set<std::string> all_below(const std::string& path) {
  std::set<std::string> out;
  for (const auto& entry : fs::recursive_directory_iterator(path)) out.insert(entry.path());
  return out;
}

RemovalOutcome remove_at(const TempDir& dir, const std::string& name, const RemovalRules& with = rules()) {
  return test::value_of(remove_entry(test::value_of(OpenDirectory::open(dir.path())), name, with));
}

TEST_CASE("remove_entry: files, links and whole trees; links are not followed") {
  const TempDir dir;
  make_tree(dir / "tree");
  make_tree(dir / "outside");
  fs::create_directory_symlink(dir / "outside", dir / "tree/link");
  fs::create_symlink("nowhere", dir / "tree/mid/dangling");
  RemovalRules only_looks = rules();
  only_looks.dry_run = true;
  const auto before = all_below(dir.path());
  const int64_t bytes = remove_at(dir, "tree", only_looks).bytes;
  CHECK(all_below(dir.path()) == before);
  const RemovalOutcome removed = remove_at(dir, "tree");
  CHECK(removed.bytes == bytes);
  CHECK(removed.bytes == 40 + static_cast<int64_t>((dir / "outside").size() + std::string("nowhere").size()));
  CHECK(removed.failures.empty());
  CHECK(dir.names() == std::vector<std::string>{"outside"});
  CHECK(remove_at(dir, "tree").bytes == 0);
  fs::create_directory_symlink(dir / "outside", dir / "link");
  CHECK(remove_at(dir, "link").failures.empty());
  CHECK(all_below(dir / "outside").size() == 7);
  CHECK(dir.names() == std::vector<std::string>{"outside"});
}

TEST_CASE("remove_entry: a name is one entry") {
  const TempDir dir;
  make_tree(dir / "tree");
  make_tree(dir / "outside");
  const OpenDirectory tree = test::value_of(OpenDirectory::open(dir / "tree"));
  for (const char* name : {"", ".", "..", "../outside", "mid/low", "/"}) {
    CAPTURE(name);
    CHECK(test::value_of(remove_entry(tree, name, rules())).failures.size() == 1);
    EXPECT_CODE(kStorage, tree.remove_file(name));
    EXPECT_CODE(kStorage, tree.remove_directory(name));
    EXPECT_CODE(kStorage, tree.open_below(name));
  }
  CHECK(all_below(dir.path()).size() == 16);
}

TEST_CASE("remove_entry: a mark deep down keeps the whole tree, a directory of that name does not") {
  const TempDir dir;
  make_tree(dir / "tree");
  fs::create_directory(dir / "tree/mark");
  test::write_all(dir / "tree/mid/low/mark", "x");
  const auto before = all_below(dir.path());
  const RemovalOutcome kept = remove_at(dir, "tree");
  CHECK(kept.kept == "it is a checkpoint of its own");
  CHECK(kept.bytes == 0);
  CHECK(all_below(dir.path()) == before);
  fs::remove(dir / "tree/mid/low/mark");
  CHECK(remove_at(dir, "tree").kept.empty());
  CHECK(dir.names().empty());
}

TEST_CASE("remove_entry: ends where it may not go on") {
  const TempDir dir;
  make_tree(dir / "tree");
  RemovalRules refused = rules();
  int asked = 0;
  refused.may_go_on = [&] { return ++asked < 20 ? Status::ok() : Status::make(base::Code::kCancelled, "no"); };
  EXPECT_CODE(kCancelled, remove_entry(test::value_of(OpenDirectory::open(dir.path())), "tree", refused));
  CHECK(asked == 20);
  CHECK(dir.has("tree"));
}

TEST_CASE("remove_entry: any depth, with few descriptors") {
  const TempDir dir;
  constexpr int kDepth = 3000;  // too deep for any path
  REQUIRE(::mkdir((dir / "deep").c_str(), 0777) == 0);
  OpenDirectory at = test::value_of(OpenDirectory::open(dir / "deep"));
  for (int i = 0; i < kDepth; ++i) {
    REQUIRE(::mkdirat(at.fd(), "below", 0777) == 0);
    OpenDirectory next = test::value_of(at.open_below("below"));
    at = std::move(next);
  }
  CHECK(remove_at(dir, "deep").failures.empty());
  CHECK(dir.names().empty());
}

/// What replaces a directory that is moved away.
enum class Swap { kLink, kDirectory, kFile };

TEST_CASE("remove_entry: whatever takes the place of a directory at any step, nothing outside goes") {
  for (const char* swapped : {"run", "run/tree", "run/tree/mid", "run/tree/mid/low", "run/tree/empty"}) {
    for (const Swap swap : {Swap::kLink, Swap::kDirectory, Swap::kFile}) {
      for (int step = 1, asked = step; asked >= step; ++step) {
        CAPTURE(swapped);
        CAPTURE(static_cast<int>(swap));
        CAPTURE(step);
        const TempDir dir;
        for (const char* top : {"", "outside/", "other/"}) make_tree(dir / (std::string(top) + "run/tree"));
        const auto before = all_below(dir / "outside");
        const std::string path = dir / swapped;
        const OpenDirectory run = test::value_of(OpenDirectory::open(dir / "run"));
        RemovalRules disturbed = rules();
        asked = 0;
        disturbed.may_go_on = [&] {
          if (++asked != step || !fs::is_directory(path)) return Status::ok();
          fs::rename(path, dir / "moved");
          if (swap == Swap::kLink) fs::create_directory_symlink(dir / (std::string("outside/") + swapped), path);
          if (swap == Swap::kDirectory) fs::rename(dir / (std::string("other/") + swapped), path);
          if (swap == Swap::kFile) test::write_all(path, "x");
          return Status::ok();
        };
        (void)test::value_of(remove_entry(run, "tree", disturbed));
        CHECK(all_below(dir / "outside") == before);
      }
    }
  }
}

/// Returns a descriptor number that is free now.
int next_descriptor() {
  const int fd = ::dup(0);
  ::close(fd);
  return fd;
}

TEST_CASE("remove_entry: a directory that was moved while it is emptied is a failure, and no descriptor is left") {
  const TempDir dir;
  make_tree(dir / "tree");
  fs::create_directories(dir / "elsewhere/precious");
  const int before = next_descriptor();
  RemovalRules moving = rules();
  moving.may_go_on = [&] {
    // The last of its files is gone, but the directory is not.
    if (fs::exists(dir / "tree/mid/low") && fs::is_empty(dir / "tree/mid/low")) {
      fs::rename(dir / "tree/mid/low", dir / "elsewhere/low");
    }
    return Status::ok();
  };
  const RemovalOutcome removed = remove_at(dir, "tree", moving);
  REQUIRE(removed.failures.size() == 1);
  CHECK(test::contains(removed.failures[0].message(), "was moved meanwhile"));
  CHECK(fs::exists(dir / "elsewhere/precious"));
  CHECK(dir.has("tree/mid"));
  CHECK(next_descriptor() == before);
}

}  // namespace
}  // namespace bytecheckpoint::io
