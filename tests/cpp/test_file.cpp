// SPDX-License-Identifier: Apache-2.0
#include "csrc/io/file.h"

#include <sys/stat.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <string>
#include <thread>
#include <vector>

#include "tests/cpp/aligned_bytes.h"
#include "tests/cpp/expect.h"
#include "tests/cpp/file_size_limit.h"
#include "tests/cpp/temp_dir.h"

namespace bytecheckpoint::io {
namespace {

using base::Status;
using test::TempDir;

File created(const std::string& path, bool direct = false) {
  return test::value_of(File::create(path, direct));
}

TEST_CASE("file: create makes a new file and never touches what is there") {
  const TempDir dir;
  const File file = created(dir / "a");
  CHECK(file.is_open());
  CHECK(file.path() == dir / "a");
  const Status again = File::create(dir / "a", true).status();
  CHECK((again.code() == base::Code::kStorage));
  CHECK(again.sys_errno() == EEXIST);
  CHECK(again.path() == dir / "a");
  REQUIRE(::symlink((dir / "target").c_str(), (dir / "link").c_str()) == 0);
  CHECK(File::create(dir / "link", false).status().sys_errno() == EEXIST);
  CHECK_FALSE(dir.has("target"));
  CHECK(File::create(dir / "missing/a", false).status().sys_errno() == ENOENT);
}

TEST_CASE("file: open refuses what is not a regular file, without waiting") {
  const TempDir dir;
  CHECK(File::open(dir.path(), "absent", true).status().sys_errno() == ENOENT);
  CHECK(File::open(dir.path(), ".", false).status().sys_errno() == EISDIR);
  REQUIRE(::mkfifo((dir / "fifo").c_str(), 0600) == 0);
  CHECK(File::open(dir.path(), "fifo", false).status().sys_errno() == EINVAL);
  CHECK_FALSE(File::open("/dev", "zero", false).is_ok());
  test::write_all(dir / "a", "x");
  REQUIRE(::symlink("a", (dir / "link").c_str()) == 0);
  EXPECT_FAILURE(kCorrupt, "symbolic link", File::open(dir.path(), "link", true));
  EXPECT_FAILURE(kCorrupt, "leads out of", File::open(dir.path(), "../a", false));
  REQUIRE(::symlink(dir.path().c_str(), (dir / "way").c_str()) == 0);
  EXPECT_OK(File::open(dir / "way", "a", true));
}

TEST_CASE("file: what is written is read, direct or not, aligned or not") {
  for (const bool direct : {false, true}) {
    for (const int64_t size : {0, 1, 511, 4095, 4096, 4097, 8192, 100000, (1 << 20) + 12345}) {
      CAPTURE(direct);
      CAPTURE(size);
      const TempDir dir;
      const std::string content = test::patterned(size);
      File file = created(dir / "a", direct);
      const auto bytes = test::aligned_bytes(content);
      EXPECT_OK(file.write_at(bytes.get(), size, 0));
      EXPECT_OK(file.sync());
      CHECK(test::value_of(file.size()) == size);
      CHECK((test::read_all(dir / "a") == content));
      File reading = test::value_of(File::open(dir.path(), "a", direct));
      const int64_t rounded = base::align_up(size, kDirectAlignment);
      const auto back = test::aligned_bytes(rounded);
      CHECK(test::value_of(reading.read_at(back.get(), rounded, 0, size)) == size);
      CHECK((std::string(reinterpret_cast<char*>(back.get()), static_cast<size_t>(size)) == content));
    }
  }
}

TEST_CASE("file: a direct file takes unaligned buffers, offsets and lengths in any order") {
  const TempDir dir;
  const std::string content = test::patterned(50000);
  File file = created(dir / "a", true);
  const auto bytes = test::aligned_bytes(content);
  EXPECT_OK(file.write_at(bytes.get(), 4096, 0));
  EXPECT_OK(file.write_at(bytes.get() + 4096, 10000, 4096));
  EXPECT_OK(file.write_at(bytes.get() + 14096, 35904, 14096));
  EXPECT_OK(file.write_at(bytes.get(), 8192, 0));
  CHECK((test::read_all(dir / "a") == content));
  File reading = test::value_of(File::open(dir.path(), "a", true));
  std::string back(33333, '\0');
  EXPECT_OK(reading.read_at(back.data(), 33333, 7, 33333));
  CHECK((back == content.substr(7, 33333)));
}

TEST_CASE("file: pieces of memory go to the file one behind another, whatever their alignment") {
  const std::string content = test::patterned(100000);
  const auto bytes = test::aligned_bytes(content);
  const auto* const from = reinterpret_cast<const char*>(bytes.get());
  for (const bool direct : {false, true}) {
    for (const std::vector<size_t>& cuts : std::vector<std::vector<size_t>>{{},
                                                                            {0},
                                                                            {100000},
                                                                            {4096, 8192, 40960},
                                                                            {4096, 8192, 40960, 100000},
                                                                            {1, 4097, 8193},
                                                                            {4096, 0, 8192, 5, 1}}) {
      CAPTURE(direct);
      const TempDir dir;
      File file = created(dir / "a", direct);
      std::vector<std::string_view> pieces;
      std::string expected;
      size_t at = 0;
      // Memory of one piece is behind that of the next, so that a mistaken order shows.
      for (const size_t size : cuts) {
        pieces.emplace_back(from + base::align_down(static_cast<int64_t>(100000 - size), 4096), size);
        expected += pieces.back();
        at += size;
      }
      EXPECT_OK(file.write_at(pieces, 0));
      EXPECT_OK(file.close());
      CHECK((test::read_all(dir / "a") == expected));
      CHECK(at == expected.size());
    }
  }
}

TEST_CASE("file: pieces that do not all find room are refused with what is missing") {
  const TempDir dir;
  File file = created(dir / "a");
  const std::string content = test::patterned(30000);
  const std::string_view all = content;
  Status status = Status::ok(), none = Status::ok();
  {
    const test::FileSizeLimit limit(10000);  // not while doctest writes, maybe to a file
    status = file.write_at({all.substr(0, 7000), all.substr(7000, 2000), all.substr(9000)}, 0);
    none = file.write_at({all.substr(0, 7000), all.substr(7000)}, 10000);
  }
  CHECK(status.sys_errno() == EFBIG);
  CHECK(status.message().find("pwrite(" + (dir / "a") + ", offset=10000, 20000 bytes)") == 0);
  CHECK(none.sys_errno() == EFBIG);
  CHECK(none.message().find("pwritev(" + (dir / "a") + ", offset=10000, 30000 bytes)") == 0);
  CHECK((test::read_all(dir / "a") == content.substr(0, 10000)));
}

TEST_CASE("file: a read that meets the end says how much there was") {
  for (const bool direct : {false, true}) {
    CAPTURE(direct);
    const TempDir dir;
    test::write_all(dir / "a", test::patterned(5000));
    File file = test::value_of(File::open(dir.path(), "a", direct));
    const auto bytes = test::aligned_bytes(16384);
    CHECK(test::value_of(file.read_at(bytes.get(), 8192, 0, 5000)) == 5000);
    const Status status = file.read_at(bytes.get(), 8192, 4096, 8192).status();
    CHECK((status.code() == base::Code::kCorrupt));
    CHECK(status.path() == dir / "a");
    CHECK(status.message() == "pread(" + (dir / "a") + ", offset=4096, 8192 bytes): file ends after 904 bytes");
    EXPECT_FAILURE(kCorrupt, "file ends after 0 bytes", file.read_at(bytes.get(), 4096, 1 << 20, 1));
    CHECK(test::value_of(file.read_at(bytes.get(), 4096, 1 << 20, 0)) == 0);
  }
}

TEST_CASE("file: a refusal names operation, path and offset") {
  const TempDir dir;
  test::write_all(dir / "a", "old");
  File file = test::value_of(File::open(dir.path(), "a", false));
  EXPECT_FAILURE(kStorage, "pwrite(" + (dir / "a") + ", offset=12, 3 bytes): ", file.write_at("new", 3, 12));
  CHECK(file.write_at("new", 3, 12).sys_errno() == EBADF);
  CHECK(test::read_all(dir / "a") == "old");
  char byte = 0;
  EXPECT_FAILURE(kStorage, "offset=-1", file.read_at(&byte, 1, -1, 1));
}

TEST_CASE("file: a write that is cut short goes on, and the refusal that follows is told") {
  const TempDir dir;
  File file = created(dir / "a");
  const std::string content = test::patterned(30000);
  Status status = Status::ok();
  {
    const test::FileSizeLimit limit(10000);
    status = file.write_at(content.data(), 30000, 0);
  }
  CHECK((status.code() == base::Code::kStorage));
  CHECK(status.sys_errno() == EFBIG);
  CHECK(test::contains(status.message(), "offset=10000, 20000 bytes"));
}

TEST_CASE("file: reserving asks for space and keeps the size") {
  const TempDir dir;
  File file = created(dir / "a");
  EXPECT_OK(file.reserve(1 << 20));
  EXPECT_OK(file.reserve(0));
  EXPECT_OK(file.reserve(-1));
  CHECK(test::value_of(file.size()) == 0);
  EXPECT_OK(file.write_at("abc", 3, 0));
  EXPECT_OK(file.truncate(3));
  CHECK(test::read_all(dir / "a") == "abc");
}

TEST_CASE("file: disjoint ranges from many threads") {
  constexpr int64_t kPart = 64 << 10;
  constexpr int kThreads = 4;
  const TempDir dir;
  const std::string content = test::patterned(kThreads * kPart * 4 + 100);
  const auto bytes = test::aligned_bytes(content);
  File file = created(dir / "a", true);
  std::vector<Status> outcomes(kThreads);
  std::vector<std::thread> threads;
  for (int t = 0; t < kThreads; ++t) {
    threads.emplace_back([&, t] {
      for (int64_t part = t; part < 4 * kThreads && outcomes[t].is_ok(); part += kThreads) {
        outcomes[t] = file.write_at(bytes.get() + part * kPart, kPart, part * kPart);
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  for (const Status& outcome : outcomes) EXPECT_OK(outcome);
  EXPECT_OK(file.write_at(bytes.get() + 4 * kThreads * kPart, 100, 4 * kThreads * kPart));
  CHECK((test::read_all(dir / "a") == content));
}

TEST_CASE("file: read_file gives the whole of a file") {
  const TempDir dir;
  test::write_all(dir / "a", test::patterned(70001));
  CHECK((test::value_of(read_file(dir.path(), "a")) == test::patterned(70001)));
  test::write_all(dir / "empty", "");
  CHECK(test::value_of(read_file(dir.path(), "empty")).empty());
  CHECK(read_file(dir.path(), "absent").status().sys_errno() == ENOENT);
}

TEST_CASE("file: threads whose transfers end direct I/O at the same time all succeed") {
  const TempDir dir;
  test::write_all(dir / "a", test::patterned(8192));
  for (int round = 0; round < 200; ++round) {
    File file = test::value_of(File::open(dir.path(), "a", true));
    std::atomic<int> ready{0};
    std::vector<base::Status> outcomes(4);
    std::vector<std::thread> threads;
    for (int t = 0; t < 4; ++t) {
      threads.emplace_back([&, t] {
        char bytes[100];
        ++ready;
        while (ready < 4) std::this_thread::yield();
        outcomes[t] = file.read_at(bytes, 100, 7 + 1000 * t, 100).status();
      });
    }
    for (std::thread& thread : threads) thread.join();
    for (const base::Status& outcome : outcomes) EXPECT_OK(outcome);
  }
}

}  // namespace
}  // namespace bytecheckpoint::io
