// SPDX-License-Identifier: Apache-2.0
#include <sys/stat.h>

#include <atomic>
#include <cerrno>
#include <chrono>
#include <future>
#include <string>
#include <thread>
#include <vector>

#include <memory>
#include <optional>
#include "csrc/io/reader.h"
#include "csrc/io/writer.h"
#include "tests/cpp/aligned_bytes.h"
#include "tests/cpp/expect.h"
#include "tests/cpp/stuck_memory.h"
#include "tests/cpp/temp_dir.h"

namespace bytecheckpoint::io {
namespace {

using base::Status;
using test::TempDir;

constexpr int64_t kSlotBytes = 16 << 10;

/// Slots and the queue of free slots, as a save has them.
struct Slots {
  explicit Slots(int count) : memory(test::aligned_bytes(count * kSlotBytes)), free(static_cast<size_t>(count)) {
    for (int slot = 0; slot < count; ++slot) free.push(slot);
  }
  uint8_t* operator[](int slot) const { return memory.get() + slot * kSlotBytes; }

  test::AlignedBytes memory;
  base::BoundedQueue<int> free;
};

WriteRequest request(File* file, const void* bytes, int64_t size, int64_t offset, int slot) {
  return {file, {{static_cast<const char*>(bytes), static_cast<size_t>(size)}}, size, offset, slot};
}

TEST_CASE("writer: everything that was submitted is in the file") {
  for (const int num_threads : {1, 3}) {
    const TempDir dir;
    const std::string content = test::patterned(50 * kSlotBytes + 777);
    File file = test::value_of(File::create(dir / "a", true));
    Slots slots(4);
    {
      Writer writer({num_threads, 4}, [&](int slot) { slots.free.push(slot); });
      for (size_t begin = 0; begin < content.size(); begin += kSlotBytes) {
        const int slot = *slots.free.pop();
        const std::string part = content.substr(begin, kSlotBytes);
        std::memcpy(slots[slot], part.data(), part.size());
        writer.submit(
            request(&file, slots[slot], static_cast<int64_t>(part.size()), static_cast<int64_t>(begin), slot));
      }
      EXPECT_OK(writer.finish());
      EXPECT_OK(writer.finish());
      CHECK(writer.bytes_written() == static_cast<int64_t>(content.size()));
    }
    CHECK((test::read_all(dir / "a") == content));
  }
}

TEST_CASE("writer: drained it has written everything so far, and takes more") {
  const TempDir dir;
  File file = test::value_of(File::create(dir / "file", false));
  const std::string bytes(1000, 'x');
  std::atomic<int> num_released{0};
  Writer writer({3, 4}, [&](int) { ++num_released; });
  for (int round = 1; round <= 5; ++round) {
    for (int i = 0; i < 20; ++i) {
      writer.submit(request(&file, bytes.data(), 1000, (round * 20 + i) * 1000, i));
    }
    EXPECT_OK(writer.drain());
    CHECK(writer.bytes_written() == round * 20'000);
  }
  EXPECT_OK(writer.drain());
  writer.cancel();
  EXPECT_CODE(kCancelled, writer.drain());
  EXPECT_CODE(kCancelled, writer.finish());
  CHECK(num_released == 100);
}

TEST_CASE("writer: threads may join it, and files are synced by them") {
  const TempDir dir;
  File file = test::value_of(File::create(dir / "file", false));
  const std::string bytes(1000, 'x');
  std::atomic<int> num_released{0};
  Writer writer({1, 4, 0, 0, /*io_timeout_s=*/60}, [&](int) { ++num_released; });
  for (int i = 0; i < 40; ++i) {
    writer.submit(request(&file, bytes.data(), 1000, i * 1000, i));
    if (i % 10 == 0) writer.add_threads(1);
    if (i % 10 == 5) writer.submit({&file, {}, 0, 0, -1});
  }
  EXPECT_OK(writer.drain());
  CHECK(writer.bytes_written() == 40'000);
  CHECK(num_released == 40);
  File never = test::value_of(File::open("/proc/self", "comm", false));  // which cannot be synced
  writer.submit({&never, {}, 0, 0, -1});
  const Status failure = writer.finish();
  EXPECT_CODE(kStorage, failure);
  CHECK(failure.message().find("fsync(/proc/self/comm") != std::string::npos);
  CHECK(num_released == 40);
}

TEST_CASE("writer: a failure is the first one, nothing more is written, and slots keep coming back") {
  const TempDir dir;
  test::write_all(dir / "a", "");
  File read_only = test::value_of(File::open(dir.path(), "a", false));
  File good = test::value_of(File::create(dir / "b", false));
  Slots slots(2);
  std::atomic<int> released{0};
  Writer writer({1, 2}, [&](int slot) {
    ++released;
    slots.free.push(slot);
  });
  for (int i = 0; i < 200; ++i) {
    const int slot = *slots.free.pop();
    writer.submit(request(i < 100 ? &read_only : &good, slots[slot], 10, 10 * i, slot));
  }
  EXPECT_FAILURE(kStorage, "offset=0", writer.finish());
  CHECK(writer.status().sys_errno() == EBADF);
  CHECK(released == 200);
  CHECK(test::read_all(dir / "b").empty());
}

TEST_CASE("writer: destroyed without finish it waits for what was submitted") {
  const TempDir dir;
  File file = test::value_of(File::create(dir / "a", false));
  const std::string content = test::patterned(20 * 1000);
  {
    Writer writer({2, 32}, [](int) {});
    for (int i = 0; i < 20; ++i) {
      writer.submit(request(&file, content.data() + 1000 * i, 1000, 1000 * i, i));
    }
  }
  CHECK((test::read_all(dir / "a") == content));
}

TEST_CASE(
    "writer: a rate bounds all threads together, and one that nothing could be written at is no obstacle to the end") {
  const TempDir dir;
  const std::string content = test::patterned(12 * 1000);
  const auto submit_all = [&](Writer* writer, File* file) {
    for (int i = 0; i < 12; ++i) {
      writer->submit(request(file, content.data() + 1000 * i, 1000, 1000 * i, i));
    }
  };
  for (const int num_threads : {1, 3}) {
    File file = test::value_of(File::create(dir / std::to_string(num_threads), false));
    const auto begin = std::chrono::steady_clock::now();
    Writer writer({num_threads, 12, 0, /*bytes_per_s=*/100'000}, [](int) {});
    submit_all(&writer, &file);
    EXPECT_OK(writer.finish());
    CHECK(std::chrono::steady_clock::now() - begin >= std::chrono::milliseconds(110));  // the first write need not wait
    CHECK((test::read_all(dir / std::to_string(num_threads)) == content));
  }
  File file = test::value_of(File::create(dir / "slow", false));
  Writer writer({2, 12, 0, /*bytes_per_s=*/1}, [](int) {});
  submit_all(&writer, &file);
  while (writer.bytes_written() == 0) std::this_thread::yield();
  writer.cancel();
  EXPECT_FAILURE(kCancelled, "cancelled", writer.finish());
  CHECK(writer.bytes_written() == 1000);
}

/// Returns a source of requests that cover a file in parts of kSlotBytes.
Reader::Source parts_of(const std::shared_ptr<File>& file, int64_t bytes) {
  return [file, bytes, next = int64_t{0}]() mutable -> base::Result<std::optional<ReadRequest>> {
    if (next >= bytes) return std::optional<ReadRequest>();
    ReadRequest request{file, next, std::min(kSlotBytes, bytes - next), kSlotBytes, static_cast<size_t>(next)};
    next += kSlotBytes;
    return std::optional<ReadRequest>(std::move(request));
  };
}

TEST_CASE("reader: without threads it is at its end") {
  for (const double io_timeout_s : {0.0, 60.0}) {
    Reader reader(0, 2, [] { return std::optional<ReadRequest>(); }, [](int) { return nullptr; }, io_timeout_s);
    CHECK_FALSE(reader.next().has_value());
  }
}

TEST_CASE("reader: every request is answered once, whatever the number of threads and slots") {
  const TempDir dir;
  const std::string content = test::patterned(40 * kSlotBytes + 99);
  test::write_all(dir / "a", content);
  for (const auto& [num_threads, num_slots] : {std::pair{1, 1}, {1, 4}, {2, 2}, {3, 8}, {4, 4}}) {
    CAPTURE(num_threads);
    CAPTURE(num_slots);
    auto file = std::make_shared<File>(test::value_of(File::open(dir.path(), "a", true)));
    Slots slots(num_slots);
    Reader reader(num_threads, num_slots, parts_of(file, static_cast<int64_t>(content.size())),
                  [&](int slot) { return slots[slot]; });
    std::string got(content.size(), '\0');
    int answers = 0;
    while (const auto filled = reader.next()) {
      EXPECT_OK(filled->status);
      std::memcpy(&got[filled->request.tag], slots[filled->slot], static_cast<size_t>(filled->request.wanted));
      ++answers;
      reader.release(filled->slot);
    }
    CHECK(answers == 41);
    CHECK((got == content));
  }
}

TEST_CASE("writer: a write that takes too long is a failure, and only the end of the writer waits for it") {
  test::StuckMemory stuck(kSlotBytes);
  if (!stuck.is_stuck()) {
    MESSAGE("NOT TESTED: this user may not have memory at which a system call hangs (userfaultfd)");
    return;
  }
  const TempDir dir;
  File file = test::value_of(File::create(dir / "a", false));
  std::atomic<int> released{0};
  {
    Writer writer({2, 4, 0, 0, /*io_timeout_s=*/0.2}, [&](int) { ++released; });
    writer.submit(request(&file, stuck.get(), kSlotBytes, 0, 0));
    EXPECT_FAILURE(kStorage, "pwrite(" + (dir / "a") + "): the storage has not answered for 0.2 s", writer.finish());
    CHECK(writer.status().sys_errno() == ETIMEDOUT);
    CHECK(writer.finish().sys_errno() == ETIMEDOUT);
    CHECK(released == 0);
    CHECK(writer.bytes_written() == 0);
    stuck.let_go();
  }
  CHECK(released == 1);
}

TEST_CASE("writer: only writes can take too long, not the waits for their turns or for something to write") {
  const TempDir dir;
  const std::string content = test::patterned(3 * 1000);
  File file = test::value_of(File::create(dir / "a", false));
  Writer writer({1, 3, 0, /*bytes_per_s=*/1000, /*io_timeout_s=*/1.5}, [](int) {});
  for (int i = 0; i < 3; ++i) {
    writer.submit(request(&file, content.data() + 1000 * i, 1000, 1000 * i, i));
  }
  EXPECT_OK(writer.finish());  // two seconds after the first write
  CHECK((test::read_all(dir / "a") == content));
}

TEST_CASE("reader: a read that takes too long arrives with its reason") {
  const TempDir dir;
  test::write_all(dir / "a", test::patterned(kSlotBytes));
  auto file = std::make_shared<File>(test::value_of(File::open(dir.path(), "a", false)));
  for (const bool waits : {true, false}) {
    test::StuckMemory stuck(kSlotBytes);
    if (!stuck.is_stuck()) {
      MESSAGE("NOT TESTED: this user may not have memory at which a system call hangs (userfaultfd)");
      return;
    }
    Reader reader(2, 1, parts_of(file, kSlotBytes), [&](int) { return stuck.get(); }, /*io_timeout_s=*/0.2, dir.path());
    std::optional<FilledSlot> filled;
    while (!filled.has_value()) filled = waits ? reader.next() : reader.try_next();
    CHECK(filled->slot == -1);
    EXPECT_FAILURE(kStorage, "pread(" + (dir / "a") + "): the storage has not answered for 0.2 s", filled->status);
    CHECK(filled->status.sys_errno() == ETIMEDOUT);
    stuck.let_go();
  }
}

TEST_CASE("reader: a source that takes too long arrives with its reason, whatever other threads wait for") {
  std::promise<void> opening;
  const auto opened = opening.get_future().share();
  Slots slots(3);
  Reader reader(
      3, 3,
      [&]() -> base::Result<std::optional<ReadRequest>> {
        opened.wait();
        return std::optional<ReadRequest>();
      },
      [&](int slot) { return slots[slot]; }, /*io_timeout_s=*/0.2, "/ckpt");
  const auto filled = reader.next();
  REQUIRE(filled.has_value());
  EXPECT_FAILURE(kStorage, "open(/ckpt): the storage has not answered", filled->status);
  opening.set_value();
}

TEST_CASE("reader: nothing to read is the end at once") {
  Slots slots(2);
  Reader reader(
      2, 2, []() -> base::Result<std::optional<ReadRequest>> { return std::optional<ReadRequest>(); },
      [&](int slot) { return slots[slot]; });
  CHECK_FALSE(reader.next().has_value());
}

TEST_CASE("reader: a read that fails arrives with its reason, and the reader can be destroyed") {
  const TempDir dir;
  test::write_all(dir / "a", test::patterned(5 * kSlotBytes));
  auto file = std::make_shared<File>(test::value_of(File::open(dir.path(), "a", false)));
  Slots slots(2);
  Reader reader(2, 2, parts_of(file, 100 * kSlotBytes), [&](int slot) { return slots[slot]; });
  Status failure;
  while (failure.is_ok()) {
    const auto filled = reader.next();
    REQUIRE(filled.has_value());
    failure = filled->status;
    if (failure.is_ok()) reader.release(filled->slot);
  }
  EXPECT_FAILURE(kCorrupt, "file ends after 0 bytes", failure);
}

TEST_CASE("reader: a source that fails arrives with its reason") {
  Slots slots(3);
  Reader reader(
      3, 3, []() -> base::Result<std::optional<ReadRequest>> { return Status::make(base::Code::kChanged, "newer"); },
      [&](int slot) { return slots[slot]; });
  const auto filled = reader.next();
  REQUIRE(filled.has_value());
  EXPECT_FAILURE(kChanged, "newer", filled->status);
}

TEST_CASE("reader: destroyed in the middle it stops") {
  const TempDir dir;
  test::write_all(dir / "a", test::patterned(100 * kSlotBytes));
  auto file = std::make_shared<File>(test::value_of(File::open(dir.path(), "a", true)));
  for (int consumed = 0; consumed < 4; ++consumed) {
    Slots slots(4);
    Reader reader(3, 4, parts_of(file, 100 * kSlotBytes), [&](int slot) { return slots[slot]; });
    for (int i = 0; i < consumed; ++i) REQUIRE(reader.next().has_value());
  }
}

TEST_CASE("reader: more threads than slots end, each of them") {
  const TempDir dir;
  test::write_all(dir / "a", test::patterned(5 * kSlotBytes));
  const auto file = std::make_shared<File>(test::value_of(File::open(dir.path(), "a", false)));
  for (const bool fails : {false, true}) {
    Slots slots(2);
    int64_t next = 0;
    const auto source = [&]() -> base::Result<std::optional<ReadRequest>> {
      if (fails && next == 3) return Status::make(base::Code::kCorrupt, "of the source");
      if (next == 5) return std::optional<ReadRequest>();
      const int64_t offset = kSlotBytes * next++;
      return std::optional<ReadRequest>(ReadRequest{file, offset, kSlotBytes, kSlotBytes, 0});
    };
    Reader reader(9, 2, source, [&](int slot) { return slots[slot]; });
    int filled = 0;
    bool failed = false;
    while (const auto slot = reader.next()) {
      if (!slot->status.is_ok()) {
        failed = true;
        continue;
      }
      ++filled;
      reader.release(slot->slot);
    }
    CHECK(filled == (fails ? 3 : 5));
    CHECK(failed == fails);
  }
}

}  // namespace
}  // namespace bytecheckpoint::io
