// SPDX-License-Identifier: Apache-2.0
#include "csrc/engine/commit/lock_file.h"

#include <fcntl.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include <array>
#include <atomic>
#include <chrono>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "tests/cpp/expect.h"
#include "tests/cpp/temp_dir.h"

namespace bytecheckpoint::engine {
namespace {

using Probe = LockFile::Probe;
using test::TempDir;

Probe probed(const std::string& path, bool remove_if_free = false) {
  return test::value_of(LockFile::probe(path, remove_if_free));
}

/// A pipe on which one process waits for another.
struct Gate {
  Gate() { REQUIRE(::pipe(ends.data()) == 0); }
  ~Gate() {
    ::close(ends[0]);
    ::close(ends[1]);
  }
  void open() const { (void)!::write(ends[1], "x", 1); }
  void wait() const {
    char byte;
    (void)!::read(ends[0], &byte, 1);
  }
  std::array<int, 2> ends{};
};

/// The code of a child that a saver forks: it stays alive until it is told to end.
[[noreturn]] void live_on(const Gate& started, const Gate& end) {
  started.open();  // fork handlers have run when fork returns
  end.wait();
  ::_exit(0);
}

TEST_CASE("lock_file: held as long as it lives, free when let go, gone when removed") {
  const TempDir dir;
  const std::string path = dir / "tmp";
  CHECK((probed(path) == Probe::kGone));
  LockFile lock = test::value_of(LockFile::create(path));
  CHECK((probed(path) == Probe::kHeld));
  CHECK((probed(path, true) == Probe::kHeld));
  CHECK(dir.has("tmp"));
  LockFile moved = std::move(lock);
  CHECK((probed(path) == Probe::kHeld));
  moved.release();
  CHECK((probed(path) == Probe::kFree));
  CHECK(dir.has("tmp"));
  CHECK((probed(path, true) == Probe::kFree));
  CHECK_FALSE(dir.has("tmp"));
  EXPECT_OK(moved.remove());
}

TEST_CASE("lock_file: whoever only looks, with a shared lock for a moment, makes nobody believe in a live save") {
  const TempDir dir;
  const std::string path = dir / "tmp";
  test::value_of(LockFile::create(path)).release();
  std::atomic<bool> is_over = false;
  std::thread looking([&] {
    const int fd = ::open(path.c_str(), O_RDONLY | O_CLOEXEC);
    while (!is_over) {
      ::flock(fd, LOCK_SH | LOCK_NB);
      ::flock(fd, LOCK_UN);
      std::this_thread::sleep_for(std::chrono::microseconds(20));
    }
    ::close(fd);
  });
  for (int i = 0; i < 2000; ++i) CHECK((probed(path) == Probe::kFree));
  is_over = true;
  looking.join();
}

TEST_CASE("lock_file: seen to be held as long as it lives, without a lock of the one who looks") {
  const TempDir dir;
  const std::string path = dir / "tmp";
  const auto is_seen = [&] { return test::value_of(LockFile::is_seen_held(path)); };
  CHECK_FALSE(is_seen());
  LockFile lock = test::value_of(LockFile::create(path));
  CHECK(is_seen());
  CHECK(lock.has_name());
  lock.release();
  CHECK_FALSE(is_seen());
  CHECK((probed(path, true) == Probe::kFree));
  REQUIRE(::symlink("elsewhere", path.c_str()) == 0);
  CHECK_FALSE(is_seen());
}

TEST_CASE("lock_file: never takes over a file that is there") {
  const TempDir dir;
  test::write_all(dir / "tmp", "old");
  EXPECT_CODE(kStorage, LockFile::create(dir / "tmp"));
  CHECK(test::read_all(dir / "tmp") == "old");
}

TEST_CASE("lock_file: removing takes the name away, also after somebody else did") {
  const TempDir dir;
  LockFile lock = test::value_of(LockFile::create(dir / "tmp"));
  EXPECT_OK(lock.remove());
  CHECK_FALSE(dir.has("tmp"));
  LockFile again = test::value_of(LockFile::create(dir / "tmp"));
  REQUIRE(::unlink((dir / "tmp").c_str()) == 0);
  EXPECT_OK(again.remove());
}

TEST_CASE("lock_file: a forked child does not keep the lock after its parent let go") {
  const TempDir dir;
  const Gate started, end;
  LockFile lock = test::value_of(LockFile::create(dir / "tmp"));
  const pid_t child = ::fork();
  if (child == 0) live_on(started, end);
  started.wait();
  CHECK((probed(dir / "tmp") == Probe::kHeld));
  lock.release();
  CHECK((probed(dir / "tmp") == Probe::kFree));  // while the child is alive
  end.open();
  REQUIRE(::waitpid(child, nullptr, 0) == child);
}

TEST_CASE("lock_file: the lock goes with its process, although a child of that process lives on") {
  const TempDir dir;
  const Gate started, end;
  const pid_t saver = ::fork();
  if (saver == 0) {
    auto lock = LockFile::create(dir / "tmp");
    if (!lock.is_ok()) ::_exit(1);
    if (::fork() == 0) live_on(started, end);
    started.wait();
    ::_exit(0);  // no destructor, as in a crash
  }
  int status = 0;
  REQUIRE(::waitpid(saver, &status, 0) == saver);
  REQUIRE(WEXITSTATUS(status) == 0);
  CHECK((probed(dir / "tmp", true) == Probe::kFree));
  CHECK_FALSE(dir.has("tmp"));
  end.open();
}

TEST_CASE(
    "lock_file: what a forked child does with its copy does nothing to the parent, nor to the child's own files") {
  const TempDir dir;
  LockFile lock = test::value_of(LockFile::create(dir / "tmp"));
  const pid_t child = ::fork();
  if (child == 0) {
    const int own = ::dup(0);  // takes the descriptor number that the fork handler freed
    (void)lock.remove().is_ok();
    lock.release();
    {
      const LockFile moved = std::move(lock);
    }
    ::_exit(::fcntl(own, F_GETFD) == -1 ? 1 : 0);
  }
  int status = 0;
  REQUIRE(::waitpid(child, &status, 0) == child);
  CHECK(WEXITSTATUS(status) == 0);
  CHECK(dir.has("tmp"));
  CHECK((probed(dir / "tmp") == Probe::kHeld));
}

TEST_CASE("lock_file: what is no regular file is no save's, and is left alone") {
  const TempDir dir;
  REQUIRE(::symlink("elsewhere", (dir / "link").c_str()) == 0);
  REQUIRE(::mkdir((dir / "sub").c_str(), 0700) == 0);
  REQUIRE(::mkfifo((dir / "fifo").c_str(), 0700) == 0);
  for (const char* name : {"link", "sub", "fifo"}) {
    CHECK((probed(dir / name) == Probe::kGone));
    EXPECT_OK(LockFile::probe(dir / name, true));
    CHECK(dir.has(name));
  }
}

TEST_CASE("lock_file: more locks than the table of descriptors still lock") {
  const TempDir dir;
  std::vector<LockFile> locks;
  for (int i = 0; i < 70; ++i) locks.push_back(test::value_of(LockFile::create(dir / std::to_string(i))));
  for (int i = 0; i < 70; ++i) CHECK((probed(dir / std::to_string(i)) == Probe::kHeld));
  locks.clear();
  for (int i = 0; i < 70; ++i) CHECK((probed(dir / std::to_string(i)) == Probe::kFree));
}

}  // namespace
}  // namespace bytecheckpoint::engine
