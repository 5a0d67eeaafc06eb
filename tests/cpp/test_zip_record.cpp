// SPDX-License-Identifier: Apache-2.0
#include "csrc/format/torch/zip_record.h"

#include <cstring>
#include <limits>
#include <string>

#include "csrc/base/bytes.h"
#include "csrc/base/crc32.h"
#include "tests/cpp/expect.h"
#include "tests/cpp/random_box.h"

// tests/unit/test_format.py checks from Python that zipfile and torch.load read these archives.

namespace bytecheckpoint::format {
namespace {

using tensor::Dims;
using tensor::DType;

uint32_t u32_at(const std::string& bytes, size_t position) {
  uint32_t value;
  REQUIRE(position + 4 <= bytes.size());
  std::memcpy(&value, bytes.data() + position, 4);
  return value;
}

/// Checks the end record of a small archive, and the entries that it points at.
void check_directory(const std::string& archive, uint32_t data_crc, int64_t data_bytes) {
  const size_t end = archive.size() - 22;
  REQUIRE(u32_at(archive, end) == 0x06054B50u);
  size_t entry = u32_at(archive, end + 16);
  CHECK(entry + u32_at(archive, end + 12) == end);
  const std::string names[4] = {"archive/data.pkl", "archive/byteorder", "archive/version", "archive/data/0"};
  for (const std::string& name : names) {
    REQUIRE(u32_at(archive, entry) == 0x02014B50u);
    CHECK(archive.substr(entry + 46, name.size()) == name);
    const uint32_t local = u32_at(archive, entry + 42);
    CHECK(u32_at(archive, local) == 0x04034B50u);
    CHECK(archive.substr(local + 30, name.size()) == name);
    if (name == names[3]) {
      CHECK(u32_at(archive, entry + 16) == data_crc);
      CHECK(u32_at(archive, entry + 20) == data_bytes);
      CHECK(u32_at(archive, entry + 24) == data_bytes);
    } else {
      // Central directory and local header agree on version, flags, time, CRC and sizes.
      CHECK(archive.substr(entry + 6, 22) == archive.substr(local + 4, 22));
    }
    entry += 46 + name.size() + (u32_at(archive, entry + 28) >> 16);
  }
  CHECK(entry == end);
}

TEST_CASE("zip_record: lengths and places are known before the data") {
  test::Random random(11);
  for (int round = 0; round < 1000; ++round) {
    const auto dtype = test::draw_plain_dtype(&random);
    const Dims sizes = test::draw_sizes(&random, 5, 9);
    const int64_t offset = kRecordAlignment * test::draw(&random, 0, int64_t{1} << test::draw(&random, 1, 40));
    const ZipRecord record = test::value_of(ZipRecord::layout(dtype, sizes, offset));
    int64_t numel = 0;
    REQUIRE(tensor::checked_numel(sizes, &numel));
    REQUIRE(record.data_bytes() == numel * tensor::find_dtype(dtype)->itemsize_bytes);
    REQUIRE(record.record_offset() == offset);
    REQUIRE(record.data_offset() % kRecordAlignment == 0);
    REQUIRE(record.data_offset() == offset + static_cast<int64_t>(record.head().size()));
    const auto crc = static_cast<uint32_t>(random());
    const std::string data(static_cast<size_t>(record.data_bytes()), 'd');
    const std::string archive = record.head() + data + record.tail(crc);
    REQUIRE(static_cast<int64_t>(archive.size()) == record.record_bytes());
    check_directory(archive, crc, record.data_bytes());
  }
}

/// Checks that the measured lengths equal those of the text that is laid out.
void check_measured(DType dtype, const Dims& sizes, int64_t offset) {
  const ZipRecord record = test::value_of(ZipRecord::layout(dtype, sizes, offset));
  const RecordExtent extent = test::value_of(ZipRecord::measure(dtype, sizes, offset));
  REQUIRE(extent.data_offset == offset + static_cast<int64_t>(record.head().size()));
  REQUIRE(extent.data_bytes == record.data_bytes());
  REQUIRE(extent.record_bytes ==
          static_cast<int64_t>(record.head().size() + record.tail(1).size()) + record.data_bytes());
  REQUIRE(record.record_bytes() == extent.record_bytes);
}

TEST_CASE("zip_record: measured without its text, a record has the same numbers") {
  test::Random random(12);
  for (int round = 0; round < 20000; ++round) {
    const auto dtype = test::draw_plain_dtype(&random);
    Dims sizes = test::draw_sizes(&random, 9, 3);
    if (!sizes.empty())
      sizes[random() % sizes.size()] = test::draw(&random, 0, int64_t{1} << test::draw(&random, 0, 38));
    check_measured(dtype, sizes, kRecordAlignment * test::draw(&random, 0, int64_t{1} << test::draw(&random, 1, 40)));
  }
  for (int64_t limit : {kLargeDataBytes, int64_t{0xFFFF0000}, int64_t{1} << 32}) {
    for (int64_t bytes = limit - 2; bytes <= limit + 2; ++bytes) {
      for (int64_t offset = 0; offset < 2 * kLargeDataAlignment; offset += kRecordAlignment) {
        check_measured(DType::kUInt8, {bytes}, offset);
        check_measured(DType::kFloat8E5M2, {1, bytes, 1}, offset);
        check_measured(DType::kBFloat16, {bytes / 2}, offset);
      }
    }
  }
  EXPECT_FAILURE(kInvalidArgument, "[-2, 3]", ZipRecord::measure(DType::kUInt8, {-2, 3}, 0));
  EXPECT_CODE(kInvalidArgument, ZipRecord::measure(DType::kNone, {2}, 0));
}

TEST_CASE("zip_record: data is aligned to 4096 from 1 MiB on, counted from the start of the file") {
  for (int64_t offset = 0; offset < 3 * kLargeDataAlignment; offset += kRecordAlignment) {
    const ZipRecord large = test::value_of(ZipRecord::layout(DType::kUInt8, {kLargeDataBytes}, offset));
    REQUIRE(large.data_offset() % kLargeDataAlignment == 0);
    REQUIRE(large.data_offset() - offset < 2 * kLargeDataAlignment);
    const ZipRecord small = test::value_of(ZipRecord::layout(DType::kUInt8, {kLargeDataBytes - 1}, offset));
    REQUIRE(small.data_offset() % kRecordAlignment == 0);
    REQUIRE(small.data_offset() - offset < 1024);
  }
}

TEST_CASE("zip_record: the same arguments give the same bytes") {
  const ZipRecord a = test::value_of(ZipRecord::layout(DType::kBFloat16, {3, 4}, 4096));
  const ZipRecord b = test::value_of(ZipRecord::layout(DType::kBFloat16, {3, 4}, 4096));
  CHECK(a.head() == b.head());
  CHECK(a.tail(7) == b.tail(7));
  CHECK(a.tail(7).size() == a.tail(0xFFFFFFFFu).size());
}

TEST_CASE("zip_record: the bytes of version 1 stay what they are") {
  const auto check = [](DType dtype, const Dims& sizes, int64_t offset, uint32_t head_crc, uint32_t tail_crc) {
    const ZipRecord record = test::value_of(ZipRecord::layout(dtype, sizes, offset));
    const std::string tail = record.tail(7);
    CHECK(base::crc32(0, record.head().data(), record.head().size()) == head_crc);
    CHECK(base::crc32(0, tail.data(), tail.size()) == tail_crc);
  };
  check(DType::kFloat32, {2}, 4096, 0x645EF815u, 0x858DDFCDu);
  check(DType::kFloat8E4M3FN, {3, 0, 5}, 64, 0xE810224Eu, 0x4C869E86u);
  check(DType::kBFloat16, {1024, 1024}, 4160, 0x79676CE9u, 0x35EAC2ADu);
  check(DType::kUInt8, {int64_t{1} << 32}, 4096, 0xC8FF7890u, 0x3636ABA5u);
}

TEST_CASE("zip_record: zip64 begins where 32 bits end, in the last entry alone") {
  const int64_t limit = 0xFFFF0000;
  const ZipRecord below = test::value_of(ZipRecord::layout(DType::kUInt8, {limit - 1}, 64));
  const ZipRecord above = test::value_of(ZipRecord::layout(DType::kUInt8, {limit}, 64));
  CHECK(below.tail(1).find("PK\x06\x06") == std::string::npos);
  CHECK(above.tail(1).find("PK\x06\x06") != std::string::npos);
  CHECK(above.tail(1).find("PK\x06\x07") != std::string::npos);
  CHECK(below.record_bytes() < int64_t{1} << 32);
  CHECK(above.data_offset() % kLargeDataAlignment == 0);
  const ZipRecord huge = test::value_of(ZipRecord::layout(DType::kComplex128, {int64_t{1} << 50}, 4096));
  CHECK(huge.record_bytes() > int64_t{1} << 54);
}

TEST_CASE("zip_record: what cannot be stored is refused, with shape and dtype") {
  const int64_t max = std::numeric_limits<int64_t>::max();
  EXPECT_FAILURE(kInvalidArgument, "[2]", ZipRecord::layout(DType::kNone, {2}, 0));
  EXPECT_CODE(kInvalidArgument, ZipRecord::layout(static_cast<DType>(200), {2}, 0));
  EXPECT_FAILURE(kInvalidArgument, "[-2, 3]", ZipRecord::layout(DType::kUInt8, {-2, 3}, 0));
  EXPECT_CODE(kInvalidArgument, ZipRecord::layout(DType::kUInt8, {max, 2}, 0));
  EXPECT_CODE(kInvalidArgument, ZipRecord::layout(DType::kFloat64, {max / 4}, 0));
  EXPECT_CODE(kInvalidArgument, ZipRecord::layout(DType::kUInt8, {max}, 0));
  // There are no elements, but torch cannot represent the strides.
  EXPECT_CODE(kInvalidArgument, ZipRecord::layout(DType::kUInt8, {0, max, 2}, 0));
  EXPECT_OK(ZipRecord::layout(DType::kUInt8, {max, 0, max}, 0));
}

}  // namespace
}  // namespace bytecheckpoint::format
