// SPDX-License-Identifier: Apache-2.0
#include "csrc/io/unpacker.h"

#include <dlfcn.h>
#include <unistd.h>

#include <algorithm>
#include <filesystem>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "csrc/io/directory.h"
#include "csrc/io/file.h"
#include "tests/cpp/expect.h"
#include "tests/cpp/temp_dir.h"

using namespace bytecheckpoint;
using base::Packing;

namespace {

/// Packs by the library, as its command does: with its checksum if asked.
std::string packed_by_zstd(const std::string& bytes, bool has_checksum) {
  void* const library = ::dlopen("libzstd.so.1", RTLD_NOW);
  REQUIRE(library != nullptr);
  const auto create = reinterpret_cast<void* (*)()>(::dlsym(library, "ZSTD_createCCtx"));
  const auto set = reinterpret_cast<size_t (*)(void*, int, int)>(::dlsym(library, "ZSTD_CCtx_setParameter"));
  const auto pack =
      reinterpret_cast<size_t (*)(void*, void*, size_t, const void*, size_t)>(::dlsym(library, "ZSTD_compress2"));
  const auto end = reinterpret_cast<size_t (*)(void*)>(::dlsym(library, "ZSTD_freeCCtx"));
  constexpr int kChecksumFlag = 201;
  void* const context = create();
  set(context, kChecksumFlag, has_checksum ? 1 : 0);
  std::string out(bytes.size() + bytes.size() / 100 + 1024, '\0');
  out.resize(pack(context, out.data(), out.size(), bytes.data(), bytes.size()));
  end(context);
  return out;
}

std::string numbers(size_t count) {
  std::mt19937 random(1);
  std::string out(count, '\0');
  for (char& byte : out) byte = static_cast<char>(random() % 7);
  return out;
}

struct Packed {
  test::TempDir directory;
  std::string bytes;
  std::string packed;

  explicit Packed(size_t count, bool has_checksum = false)
      : bytes(numbers(count)), packed(packed_by_zstd(bytes, has_checksum)) {
    write("head" + packed + "tail");
  }
  void write(const std::string& content) {
    ::unlink(io::join(directory.path(), "f").c_str());
    auto file = test::value_of(io::File::create(io::join(directory.path(), "f"), false));
    EXPECT_OK(file.write_at(content.data(), static_cast<int64_t>(content.size()), 0));
    EXPECT_OK(file.close());
  }
  Packing packing() const { return {4, static_cast<int64_t>(packed.size()), static_cast<int64_t>(bytes.size())}; }
  io::File open() const {
    auto file = test::value_of(io::File::open(directory.path(), "f", false));
    EXPECT_OK(file.unpack(packing()));
    return file;
  }
};

}  // namespace

TEST_CASE("unpacker: any range, in any order, is what was packed") {
  const Packed stored(3 << 20);
  io::File file = stored.open();
  CHECK(test::value_of(file.size()) == 3 << 20);
  CHECK(file.on_disk() == nullptr);
  CHECK(test::value_of(file.read(0, 3 << 20)) == stored.bytes);
  std::mt19937 random(2);
  for (int i = 0; i < 40; ++i) {
    const auto offset = static_cast<int64_t>(random() % (3 << 20));
    const auto size = std::min<int64_t>((3 << 20) - offset, random() % 300000);
    REQUIRE(test::value_of(file.read(offset, size)) == stored.bytes.substr(offset, size));
  }
  std::string rest(10000, '\0');  // a read that asks for more than there is, as those of whole blocks do
  CHECK(test::value_of(file.read_at(rest.data(), 10000, (3 << 20) - 10, 10)) == 10);
  EXPECT_FAILURE(kCorrupt, "file ends", file.read_at(rest.data(), 10000, (3 << 20) - 10, 11));
}

TEST_CASE("unpacker: who reads piece by piece, from files newly opened, goes on where the last one was") {
  const Packed stored(8 << 20);
  constexpr int64_t kPiece = 1 << 20;
  int64_t stored_bytes = 0;
  for (int64_t offset = 0; offset < 8 << 20; offset += kPiece) {
    const auto borrowed = test::value_of(io::Unpacker::borrow("one", stored.packing(), 1 << 17));
    std::string piece(kPiece, '\0');
    const auto read = [&](void* to, int64_t size, int64_t at) -> base::Result<int64_t> {
      stored_bytes += size;
      std::copy_n(stored.packed.data() + at - 4, size, static_cast<char*>(to));
      return size;
    };
    CHECK(test::value_of(borrowed->read_at(piece.data(), kPiece, offset, read)) == kPiece);
    CHECK(piece == stored.bytes.substr(static_cast<size_t>(offset), kPiece));
  }
  CHECK(stored_bytes == static_cast<int64_t>(stored.packed.size()));
  // Another content of the same place begins anew.
  const auto first = test::value_of(io::Unpacker::borrow("one", stored.packing(), 1 << 17));
  const auto second = test::value_of(io::Unpacker::borrow("one", stored.packing(), 1 << 17));
  CHECK(first != second);
}

TEST_CASE("unpacker: a file that was replaced is unpacked from its beginning") {
  Packed stored(2 << 20);
  CHECK(test::value_of(stored.open().read(0, 1000)) == stored.bytes.substr(0, 1000));
  const std::string before = stored.bytes;
  std::reverse(stored.bytes.begin(), stored.bytes.end());
  stored.packed = packed_by_zstd(stored.bytes, false);
  stored.write("head" + stored.packed + "tail");
  CHECK(test::value_of(stored.open().read(1000, 1000)) == stored.bytes.substr(1000, 1000));
}

TEST_CASE("unpacker: threads of one file take turns") {
  const Packed stored(1 << 20);
  io::File file = stored.open();
  std::vector<std::thread> threads;
  std::vector<int> wrong(4, 0);
  for (size_t t = 0; t < wrong.size(); ++t) {
    threads.emplace_back([&, t] {
      for (int64_t offset = static_cast<int64_t>(t) << 14; offset < 1 << 20; offset += 1 << 16) {
        const auto read = file.read(offset, 1 << 14);
        if (!read.is_ok() || read.value() != stored.bytes.substr(static_cast<size_t>(offset), 1 << 14)) ++wrong[t];
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  CHECK(wrong == std::vector<int>(4, 0));
}

TEST_CASE("unpacker: a file that somebody writes again is no damage") {
  Packed stored(100000, /*has_checksum=*/false);
  io::File file = stored.open();
  std::filesystem::resize_file(io::join(stored.directory.path(), "f"), 4);
  EXPECT_FAILURE(kChanged, "the file is written again", file.read(0, 10));
}

TEST_CASE("unpacker: what is damaged is said, with the file") {
  Packed stored(100000, /*has_checksum=*/true);
  const std::string sound = stored.packed;
  SUBCASE("a flipped byte, which zstd's checksum tells") {
    for (const size_t at : {sound.size() / 2, sound.size() - 1}) {
      stored.packed = sound;
      stored.packed[at] ^= 1;
      stored.write("head" + stored.packed + "tail");
      EXPECT_FAILURE(kCorrupt, "checksum", stored.open().read(0, 100000));
    }
  }
  SUBCASE("bytes that are not zstd's") {
    stored.write("head" + std::string(sound.size(), 'x') + "tail");
    EXPECT_FAILURE(kCorrupt, "zstd cannot unpack it after 0 bytes", stored.open().read(0, 10));
    EXPECT_CODE(kCorrupt, stored.open().read(0, 10));
  }
  SUBCASE("cut off") {
    auto file = test::value_of(io::File::open(stored.directory.path(), "f", false));
    Packing shorter = stored.packing();
    shorter.bytes -= 8;
    EXPECT_OK(file.unpack(shorter));
    EXPECT_FAILURE(kCorrupt, "wanted 100000", file.read(0, 100000));
    EXPECT_CODE(kCorrupt, file.read(0, 100000));
  }
  SUBCASE("more or less than was said") {
    for (const int64_t more : {-1, 1}) {
      auto file = test::value_of(io::File::open(stored.directory.path(), "f", false));
      Packing other = stored.packing();
      other.unpacked_bytes += more;
      EXPECT_OK(file.unpack(other));
      EXPECT_CODE(kCorrupt, file.read(0, 100000 + more));
    }
  }
  SUBCASE("a file that is too short") {
    stored.write("head" + sound.substr(0, 20));
    auto file = test::value_of(io::File::open(stored.directory.path(), "f", false));
    EXPECT_FAILURE(kCorrupt, "the file has only 24 bytes", file.unpack(stored.packing()));
  }
}
