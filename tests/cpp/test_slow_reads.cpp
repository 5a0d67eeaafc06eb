// SPDX-License-Identifier: Apache-2.0
#include <doctest/doctest.h>

#include <cerrno>
#include <condition_variable>
#include <cstring>
#include <map>
#include <set>

#include "csrc/base/mutex.h"
#include "csrc/io/file.h"
#include "csrc/io/object_store.h"
#include "csrc/io/reader.h"
#include "tests/cpp/expect.h"

namespace bytecheckpoint::io {
namespace {

using base::Code;
using base::Status;

constexpr int64_t kPart = 1024;

/// One object whose bytes say where they are. The first read at some offsets waits until `let_go`; reads at others fail
/// or are slow as they are told.
class SlowObject : public ObjectStore {
 public:
  explicit SlowObject(int64_t bytes) : bytes_(bytes) {}

  base::Result<Object> open(const std::string&) override { return Object{bytes_, "1"}; }

  base::Result<int64_t> read(const std::string&, const Object&, uint8_t* to, int64_t size, int64_t offset) override {
    base::MutexLock lock(mutex_);
    const int number = ++num_reads_[offset];
    if (number == 1 && waits.count(offset) > 0) {
      changed_.wait(lock, [&] { return is_let_go_; });
      if (fails_late) return Status::storage("get", "object", "", EIO);
    }
    if (number > 1 && second_fails) return Status::storage("get", "object", "", EIO);
    std::memset(to, static_cast<int>(offset / kPart), static_cast<size_t>(size));
    return size;
  }

  base::Result<std::unique_ptr<Upload>> create(const std::string&) override {
    return Status::make(Code::kUnsupported, "create");
  }
  base::Result<std::vector<std::string>> list(const std::string&) override { return std::vector<std::string>(); }

  void let_go() {
    base::MutexLock lock(mutex_);
    is_let_go_ = true;
    changed_.notify_all();
  }
  int num_reads(int64_t offset) {
    base::MutexLock lock(mutex_);
    return num_reads_[offset];
  }

  std::set<int64_t> waits;
  bool fails_late = false;
  bool second_fails = false;

 private:
  const int64_t bytes_;
  base::Mutex mutex_;
  std::condition_variable changed_;
  bool is_let_go_ BCP_GUARDED_BY(mutex_) = false;
  std::map<int64_t, int> num_reads_ BCP_GUARDED_BY(mutex_);
};

struct Setup {
  explicit Setup(int num_parts, std::set<int64_t> waits) : store(std::make_shared<SlowObject>(num_parts * kPart)) {
    for (const int64_t part : waits) store->waits.insert(part * kPart);
    register_store("memory://slow", store);
    file = std::make_shared<File>(test::value_of(File::open("memory://slow", "object", /*direct=*/false)));
    slots.assign(8, std::string(kPart, '\xEE'));
    for (int part = 0; part < num_parts; ++part) left.push_back(part);
  }

  std::unique_ptr<Reader> reader(int num_threads, double io_timeout_s = 0) {
    const auto source = [this]() -> base::Result<std::optional<ReadRequest>> {
      if (left.empty()) return std::optional<ReadRequest>();
      const int64_t part = left.front();
      left.erase(left.begin());
      return std::optional<ReadRequest>(ReadRequest{file, part * kPart, kPart, kPart, static_cast<size_t>(part)});
    };
    return std::make_unique<Reader>(
        num_threads, static_cast<int>(slots.size()), source,
        [this](int slot) { return reinterpret_cast<uint8_t*>(slots[static_cast<size_t>(slot)].data()); }, io_timeout_s,
        "memory://slow", /*doubles_slow_reads=*/true);
  }

  std::shared_ptr<SlowObject> store;
  std::shared_ptr<File> file;
  std::vector<std::string> slots;
  std::vector<int64_t> left;
};

/// Takes all that the reader delivers, and returns which parts these are. Each must have its own bytes.
std::multiset<size_t> take_all(Reader* reader, const Setup& setup) {
  std::multiset<size_t> parts;
  while (const auto filled = reader->next()) {
    EXPECT_OK(filled->status);
    const std::string& bytes = setup.slots[static_cast<size_t>(filled->slot)];
    CHECK(bytes == std::string(kPart, static_cast<char>(filled->request.tag)));
    parts.insert(filled->request.tag);
    reader->release(filled->slot);
  }
  return parts;
}

TEST_CASE("slow reads: a read that takes too long is doubled, and the load ends without it") {
  for (const bool fails_late : {false, true}) {
    Setup setup(20, {7, 19});
    setup.store->fails_late = fails_late;
    const auto reader = setup.reader(4);
    CHECK(take_all(reader.get(), setup).size() == 20);
    CHECK(reader->num_doubled() == 2);
    CHECK(setup.store->num_reads(7 * kPart) == 2);
    CHECK(setup.store->num_reads(8 * kPart) == 1);
    setup.store->let_go();  // the destructor waits for it
  }
}

TEST_CASE("slow reads: the first read counts if it is done before the second") {
  Setup setup(4, {});
  const auto reader = setup.reader(4);
  CHECK(take_all(reader.get(), setup) == std::multiset<size_t>{0, 1, 2, 3});
  CHECK(reader->num_doubled() == 0);
}

TEST_CASE("slow reads: if the second fails, the first counts; if both fail, that is the error") {
  for (const bool fails_late : {false, true}) {
    Setup setup(6, {2});
    setup.store->second_fails = true;
    setup.store->fails_late = fails_late;
    const auto reader = setup.reader(3);
    std::multiset<size_t> parts;
    Status failure;
    while (const auto filled = reader->next()) {
      if (filled->status.is_ok()) {
        parts.insert(filled->request.tag);
        reader->release(filled->slot);
      } else {
        failure = filled->status;
      }
      if (parts.size() == 5 && failure.is_ok()) {
        while (setup.store->num_reads(2 * kPart) < 2) std::this_thread::yield();  // it was doubled, and has failed
        setup.store->let_go();
      }
    }
    CHECK(parts.size() == (fails_late ? 5 : 6));
    CHECK(failure.is_ok() == !fails_late);
  }
}

TEST_CASE("slow reads: one that nobody waits for any more is no failure of the storage") {
  Setup setup(12, {3});
  const auto reader = setup.reader(3, /*io_timeout_s=*/2.0);
  CHECK(take_all(reader.get(), setup).size() == 12);
  std::this_thread::sleep_for(std::chrono::milliseconds(2200));
  CHECK(!reader->try_next().has_value());
  setup.store->let_go();
}

TEST_CASE("slow reads: an error of the source arrives, however many threads find it exhausted") {
  const std::string path(4 << 20, 'x');  // so long that it takes a while to hand the error over
  for (int round = 0; round < 50; ++round) {
    Reader reader(
        4, 4, [&]() -> base::Result<std::optional<ReadRequest>> { return Status::storage("open", path, "", ENOENT); },
        [](int) -> uint8_t* { return nullptr; }, 0, {}, /*doubles_slow_reads=*/true);
    const auto first = reader.next();
    REQUIRE(first.has_value());
    CHECK(first->status.sys_errno() == ENOENT);
    CHECK(!reader.next().has_value());
  }
}

TEST_CASE("slow reads: whoever gives up does not wait for a double") {
  Setup setup(3, {0, 1, 2});
  auto reader = setup.reader(3);
  setup.store->let_go();
  reader.reset();
}

}  // namespace
}  // namespace bytecheckpoint::io
