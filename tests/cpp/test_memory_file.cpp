// SPDX-License-Identifier: Apache-2.0
#include "csrc/io/memory_file.h"

#include <doctest/doctest.h>
#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <map>
#include <string>
#include <utility>
#include <vector>

#include "csrc/base/mutex.h"
#include "csrc/io/directory.h"
#include "csrc/io/file.h"
#include "tests/cpp/expect.h"

using namespace bytecheckpoint;
using base::Code;
using base::Status;

namespace {

/// Keeps descriptors, as a holder does.
class Holder : public io::ObjectStore, public io::MemoryObjects {
 public:
  ~Holder() override {
    for (const auto& [name, fd] : kept_) ::close(fd);
  }
  base::Result<Object> open(const std::string&) override { return unasked(); }
  base::Result<int64_t> read(const std::string&, const Object&, uint8_t*, int64_t, int64_t) override {
    return unasked();
  }
  base::Result<std::unique_ptr<io::Upload>> create(const std::string&) override { return unasked(); }
  base::Result<std::vector<std::string>> list(const std::string&) override { return unasked(); }
  io::MemoryObjects* in_memory() override { return this; }

  base::Result<int> descriptor(const std::string& name) override {
    base::MutexLock lock(mutex_);
    const auto found = kept_.find(name);
    if (found == kept_.end()) return Status::storage("open", name, "", ENOENT);
    return ::dup(found->second);
  }
  base::Result<int> spare(const std::string&) override { return std::exchange(spare_fd, -1); }
  Status reserve(const std::string& name, int64_t bytes, int64_t there) override {
    return bytes - there > most_bytes ? Status::storage("reserve", name, "", ENOMEM) : Status::ok();
  }
  Status keep(const std::string& name, int fd) override {
    base::MutexLock lock(mutex_);
    kept_[name] = ::open(("/proc/self/fd/" + std::to_string(fd)).c_str(), O_RDONLY | O_CLOEXEC);
    return Status::ok();
  }

  int64_t most_bytes = 1 << 20;
  int spare_fd = -1;

 private:
  static Status unasked() { return Status::make(Code::kInvalidArgument, "nobody asks this of memory"); }

  base::Mutex mutex_;
  std::map<std::string, int> kept_ BCP_GUARDED_BY(mutex_);
};

constexpr char kUrl[] = "held://run";

std::shared_ptr<Holder> registered() {
  auto holder = std::make_shared<Holder>();
  io::register_store(kUrl, holder);
  return holder;
}

io::File created(const std::string& name) {
  base::Result<io::File> file = io::File::create(io::join(kUrl, name), /*direct=*/true);
  REQUIRE(file.is_ok());
  return std::move(file.value());
}

}  // namespace

TEST_CASE("memory file: it exists when it is synced or closed, and what was reserved beyond its end is given back") {
  const auto holder = registered();
  for (const bool sync : {true, false}) {
    const std::string name = sync ? "step/a" : "step/b";
    io::File file = created(name);
    CHECK(file.on_disk() == nullptr);
    CHECK(file.takes_any_memory());
    REQUIRE(file.reserve(1 << 16).is_ok());
    REQUIRE(file.write_at("0123456789", 10, 0).is_ok());
    REQUIRE(file.write_at(std::vector<std::string_view>{"ab", "cd"}, 10).is_ok());
    REQUIRE(file.truncate(14).is_ok());
    CHECK(io::File::open(kUrl, name, true).status().sys_errno() == ENOENT);
    if (sync) REQUIRE(file.sync().is_ok());
    REQUIRE(file.close().is_ok());
    base::Result<io::File> again = io::File::open(kUrl, name, /*direct=*/true);
    REQUIRE(again.is_ok());
    CHECK(again.value().size().value() == 14);
    CHECK(again.value().read(8, 6).value() == "89abcd");
    CHECK(again.value().read(8, 7).status().code() == Code::kCorrupt);
    CHECK(again.value().version().value().bytes == 14);
  }
}

TEST_CASE("memory file: what is in spare memory is gone, and memory that is there need not be asked for") {
  const auto holder = registered();
  holder->most_bytes = 0;
  holder->spare_fd = ::memfd_create("spare", MFD_CLOEXEC);
  REQUIRE(::write(holder->spare_fd, "older bytes", 11) == 11);
  const int spare = holder->spare_fd;
  io::File file = created("a");
  CHECK(holder->spare_fd == -1);
  CHECK(file.reserve(12).sys_errno() == ENOMEM);
  REQUIRE(file.reserve(11).is_ok());
  REQUIRE(file.write_at("new", 3, 0).is_ok());
  REQUIRE(file.truncate(3).is_ok());
  struct stat info;
  REQUIRE(::fstat(spare, &info) == 0);
  CHECK(info.st_size == 3);
  REQUIRE(file.close().is_ok());
  base::Result<io::File> again = io::File::open(kUrl, "a", false);
  REQUIRE(again.is_ok());
  CHECK(again.value().read(0, 3).value() == "new");
  CHECK(again.value().size().value() == 3);
  CHECK(again.value().write_at("x", 1, 0).sys_errno() == EBADF);
}

TEST_CASE("memory file: one that is not finished leaves nothing") {
  const auto holder = registered();
  {
    const io::File file = created("a");
  }
  CHECK(io::File::open(kUrl, "a", false).status().sys_errno() == ENOENT);
}

TEST_CASE("memory file: what does not fit is refused, and a name may not lead out") {
  const auto holder = registered();
  holder->most_bytes = 100;
  io::File file = created("a");
  CHECK(file.reserve(101).sys_errno() == ENOMEM);
  CHECK(file.reserve(100).is_ok());
  for (const char* name : {"../a", "/a", "", "b/../../a"}) {
    CHECK(io::File::open(kUrl, name, false).status().code() == Code::kCorrupt);
  }
  CHECK(io::File::create("held://nobody/a", false).status().code() == Code::kUnsupported);
}
