// SPDX-License-Identifier: Apache-2.0
#include "csrc/format/manifest/write_result.h"

#include <random>
#include <string>

#include "tests/cpp/expect.h"
#include "tests/cpp/sample_manifest.h"

namespace bytecheckpoint::format {
namespace {

WriteResult sample_result() {
  const Manifest manifest = test::sample_manifest();
  WriteResult result;
  result.files = manifest.files;
  for (const Item& item : manifest.items) {
    for (const Chunk& chunk : item.chunks) result.records.push_back({item.fqn, chunk.box, chunk.record});
  }
  return result;
}

TEST_CASE("write_result: what a rank hands in comes back") {
  const WriteResult result = sample_result();
  const std::string bytes = encode_write_result(result);
  const WriteResult back = test::value_of(decode_write_result(bytes));
  CHECK(encode_write_result(back) == bytes);
  REQUIRE(back.files.size() == 2);
  CHECK(back.files[1].name == result.files[1].name);
  CHECK(back.files[1].bytes == result.files[1].bytes);
  REQUIRE(back.records.size() == result.records.size());
  for (size_t i = 0; i < back.records.size(); ++i) {
    CHECK(back.records[i].fqn == result.records[i].fqn);
    CHECK(back.records[i].box == result.records[i].box);
    CHECK(back.records[i].record.data_offset == result.records[i].record.data_offset);
    CHECK((back.records[i].record.kind == result.records[i].record.kind));
  }
  const WriteResult none = test::value_of(decode_write_result(encode_write_result({})));
  CHECK(none.files.empty());
  CHECK(none.records.empty());
}

TEST_CASE("write_result: cut, lengthened or pointing at a file that is not there it is corrupt") {
  const std::string bytes = encode_write_result(sample_result());
  for (size_t size = 0; size < bytes.size(); ++size) EXPECT_CODE(kCorrupt, decode_write_result(bytes.substr(0, size)));
  EXPECT_CODE(kCorrupt, decode_write_result(bytes + "x"));
  WriteResult result = sample_result();
  result.records[0].record.file = 2;
  EXPECT_CODE(kCorrupt, decode_write_result(encode_write_result(result)));
}

TEST_CASE("write_result: changed bytes never crash") {
  const std::string good = encode_write_result(sample_result());
  std::mt19937_64 random(14);
  for (int round = 0; round < 20000; ++round) {
    std::string bytes = good;
    for (uint64_t changes = 1 + random() % 3; changes != 0; --changes) {
      bytes[random() % bytes.size()] = static_cast<char>(random() % 3 == 0 ? 0xFF : random());
    }
    const auto result = decode_write_result(bytes);
    if (!result.is_ok()) continue;
    for (const WrittenRecord& written : result.value().records) {
      REQUIRE(written.record.file < result.value().files.size());
    }
  }
}

}  // namespace
}  // namespace bytecheckpoint::format
