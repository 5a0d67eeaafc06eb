// SPDX-License-Identifier: Apache-2.0
#include "csrc/io/object_store.h"

#include <doctest/doctest.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <map>

#include "csrc/base/mutex.h"
#include "csrc/io/directory.h"
#include "csrc/io/file.h"
#include "tests/cpp/expect.h"

using namespace bytecheckpoint;
using base::Code;
using base::Status;

namespace {

/// Objects in memory. The version of each is the number of the upload that made it.
class MemoryObjects : public io::ObjectStore {
 public:
  base::Result<Object> open(const std::string& name) override {
    base::MutexLock lock(mutex_);
    const auto found = objects_.find(name);
    if (found == objects_.end()) return Status::storage("open", name, "", ENOENT);
    return Object{static_cast<int64_t>(found->second.bytes.size()), std::to_string(found->second.version)};
  }

  base::Result<int64_t> read(const std::string& name, const Object& object, uint8_t* to, int64_t size,
                             int64_t offset) override {
    base::MutexLock lock(mutex_);
    const Stored& stored = objects_.at(name);
    if (std::to_string(stored.version) != object.version) return Status::make(Code::kChanged, name + " was replaced");
    // Stores may send less than requested.
    const int64_t part = std::min<int64_t>({size, most_at_once, static_cast<int64_t>(stored.bytes.size()) - offset});
    std::memcpy(to, stored.bytes.data() + offset, static_cast<size_t>(part));
    return part;
  }

  base::Result<std::unique_ptr<io::Upload>> create(const std::string& name) override {
    return std::unique_ptr<io::Upload>(new Uploading(this, name));
  }

  base::Result<std::vector<std::string>> list(const std::string& folder) override {
    base::MutexLock lock(mutex_);
    const std::string prefix = folder.empty() ? "" : folder + "/";
    std::vector<std::string> names;
    for (const auto& [name, stored] : objects_) {
      if (name.rfind(prefix, 0) != 0) continue;
      const std::string below = name.substr(prefix.size());
      if (below.find('/') == std::string::npos) names.push_back(below);
    }
    return names;
  }

  int64_t most_at_once = 1 << 30;

 private:
  struct Stored {
    std::string bytes;
    int version = 0;
  };

  class Uploading : public io::Upload {
   public:
    Uploading(MemoryObjects* store, std::string name) : store_(store), name_(std::move(name)) {}
    Status write_at(const uint8_t* bytes, int64_t size, int64_t offset) override {
      bytes_.resize(std::max(bytes_.size(), static_cast<size_t>(offset + size)));
      std::memcpy(bytes_.data() + offset, bytes, static_cast<size_t>(size));
      return Status::ok();
    }
    Status finish(int64_t size) override {
      CHECK(size == static_cast<int64_t>(bytes_.size()));
      base::MutexLock lock(store_->mutex_);
      Stored& stored = store_->objects_[name_];
      stored = {std::move(bytes_), stored.version + 1};
      return Status::ok();
    }

   private:
    MemoryObjects* const store_;
    const std::string name_;
    std::string bytes_;
  };

  base::Mutex mutex_;
  std::map<std::string, Stored> objects_ BCP_GUARDED_BY(mutex_);
};

constexpr char kUrl[] = "s3://bucket/run";

std::shared_ptr<MemoryObjects> registered() {
  auto store = std::make_shared<MemoryObjects>();
  io::register_store(kUrl, store);
  return store;
}

void put(const std::string& name, const std::string& bytes) {
  base::Result<io::File> file = io::File::create(io::join(kUrl, name), /*direct=*/true);
  REQUIRE(file.is_ok());
  REQUIRE(file.value().reserve(1 << 20).is_ok());
  REQUIRE(file.value().write_at(bytes.data(), static_cast<int64_t>(bytes.size()), 0).is_ok());
  REQUIRE(file.value().truncate(static_cast<int64_t>(bytes.size())).is_ok());
  REQUIRE(file.value().sync().is_ok());
  REQUIRE(file.value().close().is_ok());
}

}  // namespace

TEST_CASE("object store: an object is written and read as a file, in pieces if the store sends pieces") {
  const auto store = registered();
  put("a", "0123456789");
  for (const int64_t most : {1 << 30, 3, 1}) {
    store->most_at_once = most;
    base::Result<io::File> file = io::File::open(kUrl, "a", /*direct=*/true);
    REQUIRE(file.is_ok());
    CHECK(file.value().size().value() == 10);
    CHECK(file.value().read(2, 5).value() == "23456");
    char bytes[4096];
    // Direct reads ask for more than the object has.
    CHECK(file.value().read_at(bytes, sizeof bytes, 4, 6).value() == 6);
    CHECK(std::string(bytes, 6) == "456789");
    CHECK(file.value().read(8, 3).status().code() == Code::kCorrupt);
  }
  CHECK(io::read_file(kUrl, "a").value() == "0123456789");
  CHECK(io::list_directory(kUrl).value() == std::vector<std::string>{"a"});
  CHECK(io::entry_type(io::join(kUrl, "a")).value() == io::EntryType::kRegular);
  CHECK(io::entry_type(io::join(kUrl, "b")).value() == io::EntryType::kAbsent);
  CHECK(io::sync_directory(kUrl).is_ok());
}

TEST_CASE("object store: what is not finished is not there, and one version is read to its end") {
  registered();
  {
    base::Result<io::File> file = io::File::create(io::join(kUrl, "a"), false);
    REQUIRE(file.is_ok());
    REQUIRE(file.value().write_at("new", 3, 0).is_ok());
  }
  CHECK(io::File::open(kUrl, "a", false).status().sys_errno() == ENOENT);
  put("a", "old");
  base::Result<io::File> file = io::File::open(kUrl, "a", false);
  REQUIRE(file.is_ok());
  put("a", "new");
  CHECK(file.value().read(0, 3).status().code() == Code::kChanged);
}

TEST_CASE("object store: what is written cannot be read, nor the other way round; finished, it is closed") {
  registered();
  io::File writing = test::value_of(io::File::create(io::join(kUrl, "a"), false));
  CHECK(writing.on_disk() == nullptr);
  CHECK(writing.size().status().sys_errno() == EBADF);
  CHECK(writing.read(0, 1).status().sys_errno() == EBADF);
  EXPECT_OK(writing.write_at({std::string_view("ab"), std::string_view(), std::string_view("c")}, 0));
  EXPECT_OK(writing.truncate(3));
  EXPECT_OK(writing.sync());
  CHECK_FALSE(writing.is_open());
  CHECK(writing.write_at("d", 1, 3).sys_errno() == EBADF);
  EXPECT_OK(writing.close());
  io::File reading = test::value_of(io::File::open(kUrl, "a", false));
  CHECK(test::value_of(reading.read(0, 3)) == "abc");
  CHECK(reading.write_at("d", 1, 3).sys_errno() == EBADF);
  CHECK(reading.truncate(1).sys_errno() == EBADF);
  EXPECT_OK(reading.reserve(1));
  EXPECT_OK(reading.close());
  CHECK_FALSE(reading.is_open());
}

TEST_CASE("object store: a store serves the folders below its URL, unless they have one of their own") {
  const auto store = registered();
  const std::string step = io::join(kUrl, "step-1/model");
  base::Result<io::File> file = io::File::create(io::join(step, "a"), false);
  REQUIRE(file.is_ok());
  REQUIRE(file.value().write_at("in model", 8, 0).is_ok());
  REQUIRE(file.value().truncate(8).is_ok());
  REQUIRE(file.value().close().is_ok());
  CHECK(io::read_file(step, "a").value() == "in model");
  CHECK(io::read_file(kUrl, "step-1/model/a").value() == "in model");
  CHECK(io::list_directory(step).value() == std::vector<std::string>{"a"});
  CHECK(io::list_directory(kUrl).value().empty());
  const base::Result<io::StorePlace> place = io::place_in_store(step);
  CHECK(place.value().name == "step-1/model");
  CHECK((place.value().store == store));
  CHECK(io::place_in_store(kUrl).value().name.empty());
  CHECK(io::place_in_store("s3://bucket/runs").status().code() == Code::kUnsupported);

  io::register_store(step, std::make_shared<MemoryObjects>());
  CHECK(io::list_directory(step).value().empty());
}

TEST_CASE("object store: names that lead out, and URLs that nobody serves") {
  registered();
  for (const char* name : {"", "/a", "../a", "a/../b", ".."}) {
    CHECK(io::File::open(kUrl, name, false).status().code() == Code::kCorrupt);
  }
  CHECK(io::File::open("gs://other", "a", false).status().code() == Code::kUnsupported);
  CHECK(io::list_directory("gs://other").status().code() == Code::kUnsupported);
  CHECK(!io::is_url("/s3:/bucket"));
}

TEST_CASE("object store: of very many that a process registers the oldest are forgotten") {
  const auto store = registered();
  for (int i = 0; i < 1000; ++i) io::register_store("memory://" + std::to_string(i), store);
  CHECK(io::place_in_store("memory://999").is_ok());
  CHECK(io::place_in_store(kUrl).status().code() == Code::kUnsupported);
}
