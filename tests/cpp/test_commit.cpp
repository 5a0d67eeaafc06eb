// SPDX-License-Identifier: Apache-2.0
#include "csrc/engine/commit/commit.h"

#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cerrno>
#include <string>
#include <thread>
#include <vector>

#include "csrc/engine/open/open_checkpoint.h"
#include "tests/cpp/saved_checkpoint.h"
#include "tests/cpp/temp_dir.h"

namespace bytecheckpoint::engine {
namespace {

using test::begin_save;
using test::commit_options;
using test::PendingSave;
using test::save_id_of;
using test::TempDir;

base::Id committed_id(const TempDir& dir) {
  return test::value_of(open_checkpoint(dir.path())).save_id;
}

TEST_CASE("commit: a checkpoint is there after the commit and not before") {
  const TempDir dir;
  PendingSave save = begin_save(commit_options(dir.path(), 1), "one");
  CHECK(dir.names() == std::vector<std::string>{tmp_name(save_id_of(1)), save.file_name()});
  EXPECT_CODE(kNotFound, open_checkpoint(dir.path()));
  CHECK_FALSE(save.commit->is_over());
  const CommitReport report = test::value_of(save.finish());
  CHECK(save.commit->is_over());
  CHECK(report.directory_synced);
  CHECK(report.warnings.empty());
  CHECK(report.files_swept == 0);
  CHECK(dir.names() == std::vector<std::string>{".metadata", save.file_name()});
  CHECK(committed_id(dir) == save_id_of(1));
}

TEST_CASE("commit: a newer checkpoint replaces the older one, whose files go only then") {
  const TempDir dir;
  const std::string old_file = test::save_checkpoint(dir.path(), 1, "one");
  PendingSave save = begin_save(commit_options(dir.path(), 2), "two");
  CHECK(dir.has(old_file));
  CHECK(committed_id(dir) == save_id_of(1));
  CHECK(test::value_of(save.finish()).files_swept == 1);
  CHECK(dir.names() == std::vector<std::string>{".metadata", save.file_name()});
  CHECK(committed_id(dir) == save_id_of(2));
}

TEST_CASE("commit: large metadata are what they were, written past the page cache or through it") {
  for (const bool direct_io : {true, false}) {
    const TempDir dir;
    CommitOptions options = commit_options(dir.path(), 1);
    options.direct_io = direct_io;
    options.reserve_bytes = 32 << 20;
    PendingSave save = begin_save(std::move(options), "one");
    save.manifest.user_metadata = std::string(9 << 20, 'm');
    EXPECT_OK(save.finish());
    CHECK((test::read_all(dir / ".metadata") == format::encode_metadata_file(save.manifest)));
    CHECK((test::value_of(open_checkpoint(dir.path())).user_metadata == save.manifest.user_metadata));
  }
}

TEST_CASE("commit: who saves stands in the tmp until the metadata do") {
  const TempDir dir;
  CommitOptions options = commit_options(dir.path(), 1);
  options.about = std::string(1 << 20, 'a');  // longer than the metadata, of which nothing may be behind them
  PendingSave save = begin_save(options, "one");
  CHECK((test::read_all(dir / tmp_name(save_id_of(1))) == options.about + "\n"));
  EXPECT_OK(save.finish());
  CHECK((test::read_all(dir / ".metadata") == format::encode_metadata_file(save.manifest)));
  CHECK(dir.names() == std::vector<std::string>{".metadata", save.file_name()});
}

TEST_CASE("commit: begin makes missing directories") {
  const TempDir dir;
  test::save_checkpoint(dir / "a/b/c", 1, "one");
  EXPECT_OK(open_checkpoint(dir / "a/b/c"));
}

TEST_CASE("commit: without sync nothing is said of durability") {
  const TempDir dir;
  CommitOptions options = commit_options(dir.path(), 1);
  options.sync = false;
  PendingSave save = begin_save(options, "one");
  const CommitReport report = test::value_of(save.finish());
  CHECK_FALSE(report.directory_synced);
  CHECK(report.warnings.empty());
}

TEST_CASE("commit: while a save lives another one is busy and leaves nothing") {
  const TempDir dir;
  PendingSave live = begin_save(commit_options(dir.path(), 1), "one");
  const std::vector<std::string> before = dir.names();
  EXPECT_FAILURE(kBusy, tmp_name(save_id_of(1)), Commit::begin(commit_options(dir.path(), 2)));
  CHECK(dir.names() == before);
  EXPECT_OK(live.finish());
  EXPECT_OK(Commit::begin(commit_options(dir.path(), 2)));
}

TEST_CASE("commit: take_over takes the right away from a live save") {
  const TempDir dir;
  const std::string old_file = test::save_checkpoint(dir.path(), 1, "one");
  PendingSave loser = begin_save(commit_options(dir.path(), 2), "two");
  CommitOptions options = commit_options(dir.path(), 3);
  options.take_over = true;
  const auto winner = test::value_of(Commit::begin(options));
  // The winner's sweep removed the loser's files. The loser's error says why, and does not call its files damaged.
  EXPECT_CODE(kSuperseded, loser.commit->check_files(loser.manifest.files));
  EXPECT_CODE(kSuperseded, loser.finish());
  CHECK(committed_id(dir) == save_id_of(1));
  CHECK(dir.has(old_file));
  CHECK(dir.has(tmp_name(save_id_of(3))));
}

TEST_CASE("commit: a save whose tmp was removed cannot commit, and the old checkpoint stays") {
  const TempDir dir;
  const std::string old_file = test::save_checkpoint(dir.path(), 1, "one");
  PendingSave save = begin_save(commit_options(dir.path(), 2), "two");
  REQUIRE(::unlink((dir / tmp_name(save_id_of(2))).c_str()) == 0);
  EXPECT_CODE(kSuperseded, save.finish());
  EXPECT_CODE(kSuperseded, save.finish());
  CHECK(committed_id(dir) == save_id_of(1));
  CHECK(dir.has(old_file));
  EXPECT_OK(save.commit->abort({save.file_name()}));
  CHECK(committed_id(dir) == save_id_of(1));
  CHECK(dir.has(old_file));
}

TEST_CASE("commit: overwrite=false finds the existing checkpoint before anything is written") {
  const TempDir dir;
  test::save_checkpoint(dir.path(), 1, "one");
  const std::vector<std::string> before = dir.names();
  CommitOptions options = commit_options(dir.path(), 2);
  options.overwrite = false;
  EXPECT_CODE(kExists, Commit::begin(options));
  CHECK(dir.names() == before);
}

TEST_CASE("commit: overwrite=false finds the checkpoint that appeared meanwhile") {
  const TempDir dir, elsewhere;
  test::save_checkpoint(elsewhere.path(), 7, "seven");
  CommitOptions options = commit_options(dir.path(), 2);
  options.overwrite = false;
  PendingSave save = begin_save(options, "two");
  test::write_all(dir / ".metadata", test::read_all(elsewhere / ".metadata"));
  EXPECT_CODE(kExists, save.finish());
  CHECK(committed_id(dir) == save_id_of(7));
  CHECK_FALSE(dir.has(tmp_name(save_id_of(2))));
  // A rename was attempted, so the next save's sweep must remove the files.
  EXPECT_OK(save.commit->abort({save.file_name()}));
  CHECK(dir.has(save.file_name()));
}

TEST_CASE("commit: overwrite=false commits where there was nothing") {
  const TempDir dir;
  CommitOptions options = commit_options(dir.path(), 1);
  options.overwrite = false;
  PendingSave save = begin_save(options, "one");
  EXPECT_OK(save.finish());
  CHECK(committed_id(dir) == save_id_of(1));
}

TEST_CASE("commit: nothing is renamed after the deadline") {
  const TempDir dir;
  test::save_checkpoint(dir.path(), 1, "one");
  CommitOptions options = commit_options(dir.path(), 2);
  options.deadline_s = 0;
  PendingSave save = begin_save(options, "two");
  EXPECT_FAILURE(kSuperseded, "deadline", save.finish());
  CHECK(committed_id(dir) == save_id_of(1));
  EXPECT_OK(save.commit->abort({save.file_name()}));
  CHECK_FALSE(dir.has(save.file_name()));
  CHECK_FALSE(dir.has(tmp_name(save_id_of(2))));
  CHECK(committed_id(dir) == save_id_of(1));
}

TEST_CASE("commit: abort removes its own files and leaves the old checkpoint") {
  const TempDir dir;
  const std::string old_file = test::save_checkpoint(dir.path(), 1, "one");
  test::write_all(dir / "__0_0.distcp", "foreign");
  PendingSave save = begin_save(commit_options(dir.path(), 2), "two");
  EXPECT_OK(save.commit->abort({save.file_name(), "__0_0.distcp", "../" + save.file_name(), ".metadata"}));
  CHECK(save.commit->is_over());
  CHECK(dir.has("__0_0.distcp"));
  CHECK(dir.has(old_file));
  CHECK(dir.names().size() == 3);
  EXPECT_CODE(kSuperseded, save.finish());
  EXPECT_OK(save.commit->abort({save.file_name()}));
  EXPECT_OK(open_checkpoint(dir.path()));
}

TEST_CASE("commit: abort after the commit deletes nothing") {
  const TempDir dir;
  PendingSave save = begin_save(commit_options(dir.path(), 1), "one");
  EXPECT_OK(save.finish());
  EXPECT_OK(save.commit->abort({save.file_name()}));
  save.commit->abandon();
  CHECK(dir.names() == std::vector<std::string>{".metadata", save.file_name()});
  EXPECT_CODE(kSuperseded, save.finish());
  CHECK(committed_id(dir) == save_id_of(1));
}

TEST_CASE("commit: abandoned or destroyed, a save leaves its files to the next one's sweep") {
  const TempDir dir;
  const std::string old_file = test::save_checkpoint(dir.path(), 1, "one");
  {
    PendingSave abandoned = begin_save(commit_options(dir.path(), 2), "two");
    abandoned.commit->abandon();
    CHECK(abandoned.commit->is_over());
    CHECK(dir.has(abandoned.file_name()));
    PendingSave destroyed = begin_save(commit_options(dir.path(), 3), "three");
    CHECK_FALSE(dir.has(abandoned.file_name()));
  }
  CHECK(dir.names().size() == 3);
  const auto next = test::value_of(Commit::begin(commit_options(dir.path(), 4)));
  CHECK(dir.names() == std::vector<std::string>{".metadata", tmp_name(save_id_of(4)), old_file});
}

TEST_CASE("commit: a save that is not committed removes the empty directories that it made") {
  const TempDir dir;
  EXPECT_OK(io::make_directories(dir / "there", false));
  {
    PendingSave aborted = begin_save(commit_options(dir / "run/step-1/model", 1), "one");
    EXPECT_OK(aborted.commit->abort({aborted.file_name()}));
    CHECK(dir.names() == std::vector<std::string>{"there"});
    const auto abandoned = test::value_of(Commit::begin(commit_options(dir / "run/step-2", 2)));
    abandoned->abandon();
    CHECK(dir.names() == std::vector<std::string>{"there"});
    const auto destroyed = test::value_of(Commit::begin(commit_options(dir / "run/step-3", 3)));
    const auto of_other = test::value_of(Commit::begin(commit_options(dir / "there", 4)));
  }
  CHECK(dir.names() == std::vector<std::string>{"there"});
  // A file has that name, so the directory above it was made in vain.
  test::write_all(dir / "file", "");
  EXPECT_CODE(kStorage, Commit::begin(commit_options(dir / "file/step-1", 5)));
  EXPECT_CODE(kStorage, Commit::begin(commit_options(dir / ("run/" + std::string(300, 'x')), 6)));
  CHECK(dir.names() == std::vector<std::string>{"file", "there"});
}

TEST_CASE("commit: directories that others use stay") {
  const TempDir dir;
  PendingSave first = begin_save(commit_options(dir / "run/step-1", 1), "one");
  PendingSave second = begin_save(commit_options(dir / "run/step-2", 2), "two");
  EXPECT_OK(first.commit->abort({first.file_name()}));
  CHECK_FALSE(dir.has("run/step-1"));
  EXPECT_OK(second.finish());
  second.commit->abandon();
  EXPECT_OK(open_checkpoint(dir / "run/step-2"));
  PendingSave third = begin_save(commit_options(dir / "run/step-3", 3), "three");
  third.commit->abandon();  // the next sweep removes its files
  CHECK(dir.has("run/step-3/" + third.file_name()));
}

TEST_CASE("commit: saves that end as others begin never take a directory from them") {
  const TempDir dir;
  std::vector<std::thread> threads;
  std::vector<base::Status> outcomes(4);
  for (size_t t = 0; t < outcomes.size(); ++t) {
    threads.emplace_back([&, t] {
      const std::string path = dir / base::text("run/step-", t);
      for (int round = 0; round < 50 && outcomes[t].is_ok(); ++round) {
        outcomes[t] = Commit::begin(commit_options(path, static_cast<uint8_t>(t))).status();
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  for (const base::Status& outcome : outcomes) EXPECT_OK(outcome);
  // The save that made `run` may have ended before the others.
  for (size_t t = 0; t < outcomes.size(); ++t) CHECK_FALSE(dir.has(base::text("run/step-", t)));
}

TEST_CASE("commit: the right may be given back from another thread at any time") {
  for (int round = 0; round < 20; ++round) {
    const TempDir dir;
    test::save_checkpoint(dir.path(), 1, "one");
    PendingSave save = begin_save(commit_options(dir.path(), 2), "two");
    std::thread timer([&] { save.commit->abandon(); });
    const base::Status outcome = save.finish().status();
    timer.join();
    CHECK(save.commit->is_over());
    CHECK(committed_id(dir) == save_id_of(outcome.is_ok() ? 2 : 1));
    CHECK_FALSE(dir.has(tmp_name(save_id_of(2))));
  }
}

TEST_CASE("commit: of savers that begin at the same time one at most gets the right") {
  const TempDir dir;
  for (int round = 0; round < 10; ++round) {
    std::vector<base::Result<std::unique_ptr<Commit>>> begun;
    for (int t = 0; t < 3; ++t) begun.emplace_back(base::Status());
    std::vector<std::thread> threads;
    for (int t = 0; t < 3; ++t) {
      threads.emplace_back(
          [&, t] { begun[t] = Commit::begin(commit_options(dir.path(), static_cast<uint8_t>(10 + t))); });
    }
    for (std::thread& thread : threads) thread.join();
    int holders = 0;
    for (const auto& commit : begun) {
      if (commit.is_ok()) ++holders;
      if (!commit.is_ok()) EXPECT_CODE(kBusy, commit);
    }
    CHECK(holders <= 1);
    CHECK(dir.names().size() == static_cast<size_t>(holders));
  }
}

TEST_CASE("commit: a forked child that drops its copy leaves the right with its parent") {
  const TempDir dir;
  PendingSave save = begin_save(commit_options(dir.path(), 1), "one");
  const pid_t child = ::fork();
  if (child == 0) {
    const bool is_refused = save.commit->check_files(save.manifest.files).code() == base::Code::kCancelled;
    save.commit.reset();
    ::_exit(is_refused ? 0 : 1);
  }
  int outcome = -1;
  REQUIRE(::waitpid(child, &outcome, 0) == child);
  CHECK(outcome == 0);
  CHECK(dir.has(tmp_name(save_id_of(1))));
  EXPECT_OK(save.finish());
}

TEST_CASE("commit: metadata that is a directory is refused") {
  const TempDir dir;
  REQUIRE(::mkdir((dir / ".metadata").c_str(), 0700) == 0);
  const base::Status status = Commit::begin(commit_options(dir.path(), 1)).status();
  CHECK(status.sys_errno() == EISDIR);
  CHECK(dir.names() == std::vector<std::string>{".metadata"});
}

TEST_CASE("commit: files are looked at before the commit") {
  const TempDir dir;
  PendingSave save = begin_save(commit_options(dir.path(), 1), "one");
  const std::string path = dir / save.file_name();
  const std::string good = test::read_all(path);
  const auto checked = [&](const std::string& content) {
    test::write_all(path, content);
    return save.commit->check_files(save.manifest.files);
  };
  EXPECT_OK(checked(good));
  EXPECT_FAILURE(kCorrupt, path, checked(good.substr(1)));
  EXPECT_CODE(kCorrupt, checked(good + "x"));
  std::string damaged = good;
  damaged[good.size() - 10] ^= 1;
  EXPECT_CODE(kCorrupt, checked(damaged));
  // A trailer that is valid and has the same ids, but is not the one in the manifest.
  const size_t tail = good.size() - format::kDataTrailerBytes;
  format::DataTrailer trailer =
      test::value_of(format::decode_data_trailer(good.substr(tail), static_cast<int64_t>(good.size())));
  ++trailer.table_crc;
  EXPECT_FAILURE(kCorrupt, "rank 0", checked(good.substr(0, tail) + format::encode_data_trailer(&trailer)));
  // An undamaged file of ours with the same size, but of another save.
  const TempDir other;
  const std::string swapped = test::save_checkpoint(other.path(), 2, "two");
  EXPECT_FAILURE(kCorrupt, "rank 0", checked(test::read_all(other / swapped)));
  REQUIRE(::unlink(path.c_str()) == 0);
  const base::Status gone = save.commit->check_files(save.manifest.files);
  CHECK(gone.sys_errno() == ENOENT);
  EXPECT_OK(save.commit->check_files({}));
}

TEST_CASE("commit: removes the commit marks of single ranks and then their files") {
  const TempDir dir;
  const std::string rank_file = test::save_checkpoint(dir.path(), 1, "one");
  REQUIRE(::rename((dir / ".metadata").c_str(), (dir / "__0.metadata").c_str()) == 0);
  PendingSave save = begin_save(commit_options(dir.path(), 2), "two");
  CHECK(dir.has(rank_file));
  EXPECT_OK(save.finish());
  CHECK(dir.names() == std::vector<std::string>{".metadata", save.file_name()});
}

TEST_CASE("commit: replaces another tool's checkpoint and keeps that tool's files") {
  const TempDir dir;
  test::write_all(dir / ".metadata", std::string("\x80\x04}.", 4));
  test::write_all(dir / "__0_0.distcp", "PK");
  test::save_checkpoint(dir.path(), 1, "one");
  CHECK(committed_id(dir) == save_id_of(1));
  CHECK(dir.has("__0_0.distcp"));
}

TEST_CASE("commit: links are removed by a save that has the right, and by no other") {
  const test::TempDir dir;
  const std::string name = "__0_0.0123456789abcdef.distcp";
  auto first = test::value_of(Commit::begin(test::commit_options(dir.path(), 1)));
  test::write_all(dir / name, "linked");
  SUBCASE("it has the right") {
    EXPECT_OK(first->abort({}, false, {name, "../other"}));
    CHECK(!dir.has(name));
  }
  SUBCASE("another save has taken it") {
    CommitOptions options = test::commit_options(dir.path(), 2);
    options.take_over = true;
    auto second = test::value_of(Commit::begin(std::move(options)));
    test::write_all(dir / name, "linked again");
    EXPECT_OK(first->abort({}, false, {name}));
    CHECK(dir.has(name));
    second->abandon();
  }
  SUBCASE("it has given it up") {
    first->abandon();
    test::write_all(dir / name, "linked again");
    EXPECT_OK(first->abort({}, false, {name}));
    CHECK(dir.has(name));
  }
}

}  // namespace
}  // namespace bytecheckpoint::engine
