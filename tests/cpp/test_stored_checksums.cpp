// SPDX-License-Identifier: Apache-2.0
#include "csrc/engine/load/stored_checksums.h"

#include <string>

#include "csrc/base/crc32.h"
#include "csrc/io/directory.h"
#include "csrc/io/file.h"
#include "tests/cpp/expect.h"
#include "tests/cpp/temp_dir.h"

namespace bytecheckpoint::engine {
namespace {

const std::string kData = "the elements of a tensor";
const auto* const kBytes = reinterpret_cast<const uint8_t*>(kData.data());
const auto kSize = static_cast<int64_t>(kData.size());

format::StoredCrc stretch_at(int64_t offset) {
  return {0, offset, kSize, base::crc32(0, kBytes, kData.size())};
}

/// Adds bytes [begin, end) of the data.
void add(StoredChecksums* checksums, int64_t offset, int64_t begin, int64_t end) {
  checksums->add(stretch_at(offset), offset + begin, offset + end, kBytes + begin);
}

/// A checkpoint of one file with the data at 100.
struct Stored {
  explicit Stored(const std::string& data = kData) {
    manifest.files.resize(1);
    manifest.files[0].name = "a.distcp";
    auto file = test::value_of(io::File::create(io::join(directory.path(), "a.distcp"), false));
    const std::string content = std::string(100, ' ') + data + "behind";
    EXPECT_OK(file.write_at(content.data(), static_cast<int64_t>(content.size()), 0));
    EXPECT_OK(file.close());
  }
  base::Status finish(StoredChecksums* checksums) {
    return checksums->finish(manifest, directory.path(), [&](int64_t bytes) {
      bytes_read = bytes;
      return true;
    });
  }

  const test::TempDir directory;
  format::Manifest manifest;
  int64_t bytes_read = 0;
};

TEST_CASE("stored checksums: the parts of several stretches may come in any order, and twice") {
  StoredChecksums checksums;
  for (const int64_t begin : {12, 0, 20, 4, 12}) {
    const int64_t end = begin == 0 ? 4 : begin == 4 ? 12 : begin == 12 ? 20 : kSize;
    for (const int64_t offset : {200, 100}) add(&checksums, offset, begin, end);
  }
  EXPECT_OK(checksums.check({}, "/ckpt"));
  CHECK(checksums.take().empty());
}

TEST_CASE("stored checksums: a changed byte is told with file, offset and length") {
  format::Manifest manifest;
  manifest.files.resize(1);
  manifest.files[0].name = "a.distcp";
  std::string changed = kData;
  changed[3] = 'X';
  StoredChecksums checksums;
  add(&checksums, 100, 0, kSize);
  checksums.add(stretch_at(200), 200, 200 + kSize, reinterpret_cast<const uint8_t*>(changed.data()));
  EXPECT_FAILURE(kCorrupt, "read(/ckpt/a.distcp, offset=200, 24 bytes): the data have CRC ",
                 checksums.check(manifest, "/ckpt"));
  checksums.clear();
  EXPECT_OK(checksums.check(manifest, "/ckpt"));
}

TEST_CASE("stored checksums: what several processes have read is put together, and what is missing is read") {
  StoredChecksums first, second, all;
  add(&first, 100, 5, 9);
  add(&second, 100, 8, 12);  // which overlaps
  add(&second, 100, 15, kSize);
  EXPECT_OK(first.check({}, "/ckpt"));
  EXPECT_OK(all.merge(first.take()));
  EXPECT_OK(all.merge(second.take()));
  CHECK(first.take().empty());
  Stored sound;
  EXPECT_OK(sound.finish(&all));
  CHECK(sound.bytes_read == 11);
  EXPECT_OK(sound.finish(&all));
  StoredChecksums damaged;
  add(&damaged, 100, 5, kSize);
  Stored changed("The elements of a tensor");
  EXPECT_FAILURE(kCorrupt, "offset=100, 24 bytes): the data have CRC ", changed.finish(&damaged));
  EXPECT_CODE(kCorrupt, all.merge("cut off"));
}

TEST_CASE("stored checksums: a small part of a large stretch is not worth reading the rest") {
  StoredChecksums checksums;
  checksums.add({0, 100, int64_t{1} << 30, 7}, 100, 100 + kSize, kBytes);
  Stored stored;
  EXPECT_OK(stored.finish(&checksums));
  CHECK(stored.bytes_read == 0);
}

}  // namespace
}  // namespace bytecheckpoint::engine
