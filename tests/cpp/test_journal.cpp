// SPDX-License-Identifier: Apache-2.0
#include "csrc/io/journal.h"

#include <sys/stat.h>

#include <cerrno>
#include <string>
#include <utility>
#include <vector>

#include "csrc/io/directory.h"
#include "csrc/io/file.h"
#include "tests/cpp/expect.h"
#include "tests/cpp/temp_dir.h"

namespace bytecheckpoint::io {
namespace {

using Kind = FileSystemChange::Kind;
using test::TempDir;

/// Returns the changes that `run` makes.
template <class Run>
std::vector<FileSystemChange> journal_of(Run&& run) {
  std::vector<FileSystemChange> changes;
  const Journal note = [&](FileSystemChange change) { changes.push_back(std::move(change)); };
  keep_journal(&note);
  run();
  keep_journal(nullptr);
  return changes;
}

std::vector<Kind> kinds_of(const std::vector<FileSystemChange>& changes) {
  std::vector<Kind> kinds;
  for (const FileSystemChange& change : changes) kinds.push_back(change.kind);
  return kinds;
}

TEST_CASE("journal: has all that is done to a file, in order, with its bytes") {
  const TempDir dir;
  struct stat info{};
  const std::vector<FileSystemChange> changes = journal_of([&] {
    File file = test::value_of(File::create(dir / "a", /*direct=*/false));
    REQUIRE(::fstat(file.on_disk()->fd(), &info) == 0);
    EXPECT_OK(file.reserve(8192));
    EXPECT_OK(file.write_at("content", 7, 100));
    EXPECT_OK(file.truncate(105));
    EXPECT_OK(file.sync());
  });
  CHECK(kinds_of(changes) ==
        std::vector<Kind>{Kind::kCreateFile, Kind::kReserve, Kind::kWrite, Kind::kTruncate, Kind::kSyncFile});
  for (const FileSystemChange& change : changes) {
    CHECK(change.path == dir / "a");
    CHECK(change.file == info.st_ino);
  }
  CHECK(changes[1].offset == 8192);
  CHECK(changes[2].offset == 100);
  CHECK(changes[2].bytes == "content");
  CHECK(changes[3].offset == 105);
}

TEST_CASE("journal: has all that is done to names") {
  const TempDir dir;
  test::write_all(dir / "a", "");
  test::write_all(dir / "c", "");
  const std::vector<FileSystemChange> changes = journal_of([&] {
    EXPECT_OK(make_directories(dir / "sub", /*sync=*/false));
    EXPECT_OK(rename_new(dir / "a", dir / "b"));
    EXPECT_OK(rename_over(dir / "b", dir / "c"));
    EXPECT_OK(remove_file(dir / "c"));
    EXPECT_OK(sync_directory(dir.path()));
  });
  CHECK(kinds_of(changes) ==
        std::vector<Kind>{Kind::kMakeDirectory, Kind::kRename, Kind::kRename, Kind::kRemoveFile, Kind::kSyncDirectory});
  CHECK(changes[0].path == dir / "sub");
  CHECK(changes[1].path == dir / "a");
  CHECK(changes[1].to == dir / "b");
  CHECK(changes[4].path == dir.path());
}

TEST_CASE("journal: has nothing of what failed, of what changed nothing, and of what nobody listens to") {
  const TempDir dir;
  test::write_all(dir / "a", "");
  test::write_all(dir / "b", "");
  const std::vector<FileSystemChange> changes = journal_of([&] {
    CHECK_FALSE(File::create(dir / "a", false).is_ok());
    CHECK(rename_new(dir / "a", dir / "b").sys_errno() == EEXIST);
    CHECK_FALSE(rename_over(dir / "absent", dir / "b").is_ok());
    EXPECT_OK(remove_file(dir / "absent"));
    EXPECT_OK(make_directories(dir.path(), /*sync=*/false));
    CHECK_FALSE(sync_directory(dir / "absent").is_ok());
    EXPECT_OK(read_file(dir.path(), "a"));
  });
  CHECK(changes.empty());
  EXPECT_OK(remove_file(dir / "a"));
}

}  // namespace
}  // namespace bytecheckpoint::io
