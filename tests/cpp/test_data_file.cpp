// SPDX-License-Identifier: Apache-2.0
#include "csrc/format/data_file.h"

#include <cstring>
#include <random>
#include <string>

#include "csrc/base/crc32.h"
#include "tests/cpp/expect.h"

namespace bytecheckpoint::format {
namespace {

DataFileId sample_id() {
  DataFileId id;
  for (size_t i = 0; i < id.file_id.size(); ++i) id.file_id[i] = static_cast<uint8_t>(0xA0 + i);
  id.rank = 12;
  id.number = 3;
  return id;
}

DataTrailer sample_trailer() {
  DataTrailer trailer;
  trailer.id = sample_id();
  trailer.end_of_records = kBlockBytes + 5;
  trailer.num_blocks = 2;
  trailer.table_crc = 0x1234;
  return trailer;
}

TEST_CASE("data_file: the name comes from the id") {
  CHECK(data_file_name(sample_id()) == "__12_3.a0a1a2a3a4a5a6a7.distcp");
  CHECK(is_data_file_name(data_file_name(sample_id())));
  DataFileId largest;
  largest.rank = largest.number = 0xFFFFFFFFu;
  CHECK(is_data_file_name(data_file_name(largest)));
  CHECK(is_data_file_name(data_file_name({})));
}

TEST_CASE("data_file: names that are not ours are never taken for ours") {
  for (const char* name : {"",
                           "_",
                           "__",
                           "__0",
                           "__0_0",
                           "__0_0.distcp",
                           "__0_0.a0a1a2a3a4a5a6a7",
                           "__0_0.a0a1a2a3a4a5a6.distcp",
                           "__0_0.A0A1A2A3A4A5A6A7.distcp",
                           "__0_0.a0a1a2a3a4a5a6a7a8.distcp",
                           "__00_0.a0a1a2a3a4a5a6a7.distcp",
                           "__0_00.a0a1a2a3a4a5a6a7.distcp",
                           "__-1_0.a0a1a2a3a4a5a6a7.distcp",
                           "__0_.a0a1a2a3a4a5a6a7.distcp",
                           "___0.a0a1a2a3a4a5a6a7.distcp",
                           "x__0_0.a0a1a2a3a4a5a6a7.distcp",
                           "__0_0.a0a1a2a3a4a5a6a7.distcp.tmp",
                           "__0_0.a0a1a2a3a4a5a6a7.distcx",
                           "__0_0-a0a1a2a3a4a5a6a7.distcp",
                           "__0_0.g0a1a2a3a4a5a6a7.distcp",
                           "__12345678901_0.a0a1a2a3a4a5a6a7.distcp",
                           "__0_0.a0a1a2a3a4a5a6a7.distcp ",
                           "../__0_0.a0a1a2a3a4a5a6a7.distcp",
                           ".metadata",
                           "__0.metadata"}) {
    CAPTURE(name);
    CHECK_FALSE(is_data_file_name(name));
  }
}

TEST_CASE("data_file: a header says who wrote the file") {
  const std::string bytes = encode_header(sample_id());
  REQUIRE(static_cast<int64_t>(bytes.size()) == kHeaderBytes);
  CHECK(bytes.substr(0, 7) == "BCPDATA");
  const DataFileId id = test::value_of(decode_header(bytes));
  CHECK(id.file_id == sample_id().file_id);
  CHECK(id.rank == 12);
  CHECK(id.number == 3);
}

TEST_CASE("data_file: a header with any bit changed is refused") {
  const std::string good = encode_header(sample_id());
  std::mt19937 random(12);
  for (size_t at = 0; at < good.size(); ++at) {
    std::string bad = good;
    bad[at] = static_cast<char>(bad[at] ^ (1 << random() % 8));
    REQUIRE_FALSE(decode_header(bad).is_ok());
  }
  EXPECT_CODE(kCorrupt, decode_header(good.substr(1)));
  EXPECT_CODE(kCorrupt, decode_header(good + "x"));
  EXPECT_CODE(kCorrupt, decode_header(""));
}

TEST_CASE("data_file: a newer version is told from damage") {
  std::string header = encode_header(sample_id());
  header[8] = 2;
  EXPECT_FAILURE(kVersion, "version 2", decode_header(header));
  DataTrailer trailer = sample_trailer();
  std::string tail = encode_data_trailer(&trailer);
  tail[64] = 2;
  EXPECT_FAILURE(kVersion, "version 2", decode_data_trailer(tail, trailer.file_bytes()));
}

TEST_CASE("data_file: a trailer comes back, with the CRC the manifest repeats") {
  DataTrailer trailer = sample_trailer();
  const std::string bytes = encode_data_trailer(&trailer);
  REQUIRE(static_cast<int64_t>(bytes.size()) == kDataTrailerBytes);
  CHECK(trailer.trailer_crc != 0);
  CHECK(trailer.file_bytes() == kBlockBytes + 5 + 8 + kDataTrailerBytes);
  const DataTrailer back = test::value_of(decode_data_trailer(bytes, trailer.file_bytes()));
  CHECK(back.trailer_crc == trailer.trailer_crc);
  CHECK(back.id.file_id == trailer.id.file_id);
  CHECK(back.id.rank == 12);
  CHECK(back.id.number == 3);
  CHECK(back.end_of_records == trailer.end_of_records);
  CHECK(back.num_blocks == 2);
  CHECK(back.table_crc == 0x1234);
}

TEST_CASE("data_file: a trailer with any bit changed, or at the end of another length, is refused") {
  DataTrailer trailer = sample_trailer();
  const std::string good = encode_data_trailer(&trailer);
  for (size_t bit = 0; bit < 8 * good.size(); ++bit) {
    std::string bad = good;
    bad[bit / 8] = static_cast<char>(bad[bit / 8] ^ (1 << bit % 8));
    REQUIRE_FALSE(decode_data_trailer(bad, trailer.file_bytes()).is_ok());
  }
  EXPECT_CODE(kCorrupt, decode_data_trailer(good, trailer.file_bytes() + 1));
  EXPECT_CODE(kCorrupt, decode_data_trailer(good, trailer.file_bytes() - 1));
  EXPECT_CODE(kCorrupt, decode_data_trailer(good.substr(1), trailer.file_bytes()));
  EXPECT_CODE(kCorrupt, decode_data_trailer("", 0));
}

TEST_CASE("data_file: a trailer with a valid CRC and senseless fields is refused") {
  for (const auto& [end, blocks] : {std::pair<int64_t, int64_t>{0, 0},
                                    {-1, 0},
                                    {kHeaderBytes - 1, 1},
                                    {kHeaderBytes, 2},
                                    {kHeaderBytes, 0},
                                    {kHeaderBytes, -1}}) {
    DataTrailer trailer = sample_trailer();
    trailer.end_of_records = end;
    trailer.num_blocks = blocks;
    const std::string bytes = encode_data_trailer(&trailer);
    EXPECT_CODE(kCorrupt, decode_data_trailer(bytes, trailer.file_bytes()));
  }
}

TEST_CASE("data_file: a block table comes back; the last block is short") {
  const std::vector<uint32_t> crcs = {1, 0xFFFFFFFFu, 7};
  CHECK(decode_block_table(encode_block_table(crcs)) == crcs);
  CHECK(num_blocks_of(0) == 0);
  CHECK(num_blocks_of(1) == 1);
  CHECK(num_blocks_of(kBlockBytes) == 1);
  CHECK(num_blocks_of(kBlockBytes + 1) == 2);
}

TEST_CASE("data_file: a CRC that skips its own field does not depend on it") {
  std::string bytes(100, 'x');
  const uint32_t crc = crc_without_field(bytes, 40);
  bytes.replace(40, 4, "1234");
  CHECK(crc_without_field(bytes, 40) == crc);
  bytes[44] = 'y';
  CHECK(crc_without_field(bytes, 40) != crc);
}

TEST_CASE("data_file: a trailer that describes more than any file is damage") {
  DataTrailer trailer;
  trailer.end_of_records = INT64_MAX;
  trailer.num_blocks = 1;
  EXPECT_CODE(kCorrupt, decode_data_trailer(encode_data_trailer(&trailer), 1000));
  CHECK(decode_block_table("").empty());
}

}  // namespace
}  // namespace bytecheckpoint::format
