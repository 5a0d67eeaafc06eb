// SPDX-License-Identifier: Apache-2.0
#include <cstring>
#include "csrc/format/manifest/metadata_file.h"

#include <algorithm>
#include <string>
#include <vector>

#include "csrc/base/crc32.h"
#include "tests/cpp/expect.h"
#include "tests/cpp/sample_manifest.h"

namespace bytecheckpoint::format {
namespace {

TEST_CASE("metadata_file: pickle, manifest, table and trailer, and nothing else") {
  const Manifest manifest = test::sample_manifest();
  const std::string file = encode_metadata_file(manifest);
  const auto size = static_cast<int64_t>(file.size());
  const MetadataTrailer trailer =
      test::value_of(decode_metadata_trailer(file.substr(file.size() - kMetadataTrailerBytes), size));
  CHECK(trailer.file_bytes() == size);
  CHECK(trailer.save_id == manifest.save_id);
  const auto pickle_bytes = static_cast<size_t>(trailer.pickle_bytes);
  CHECK(file.substr(0, pickle_bytes) == metadata_pickle(manifest));
  CHECK(file[pickle_bytes - 1] == '.');  // pickle.load stops here
  CHECK(file.substr(pickle_bytes, static_cast<size_t>(trailer.manifest_bytes)) == encode_manifest(manifest));
  EXPECT_OK(check_pickle(file));
  CHECK(encode_manifest(test::value_of(decode_metadata_file(file))) == encode_manifest(manifest));
}

TEST_CASE("metadata_file: a manifest of several blocks") {
  Manifest manifest = test::sample_manifest();
  manifest.user_metadata = std::string(3 * kBlockBytes, 'u');
  std::string file = encode_metadata_file(manifest);
  CHECK(test::value_of(decode_metadata_file(file)).user_metadata == manifest.user_metadata);
  const size_t at = file.find("uuuu") + 2 * kBlockBytes;
  file[at] = 'v';
  EXPECT_FAILURE(kCorrupt, "manifest block 2", decode_metadata_file(file));
}

TEST_CASE("metadata_file: every byte is covered") {
  const std::string good = encode_metadata_file(test::sample_manifest());
  const MetadataTrailer trailer = test::value_of(
      decode_metadata_trailer(good.substr(good.size() - kMetadataTrailerBytes), static_cast<int64_t>(good.size())));
  for (size_t at = 0; at < good.size(); ++at) {
    std::string bad = good;
    bad[at] ^= 0x04;
    const bool in_pickle = at < static_cast<size_t>(trailer.pickle_bytes);
    REQUIRE(decode_metadata_file(bad).is_ok() == in_pickle);
    if (in_pickle) REQUIRE_FALSE(check_pickle(bad).is_ok());
  }
}

TEST_CASE("metadata_file: cut or lengthened it has no trailer; a foreign file never had one") {
  const std::string good = encode_metadata_file(test::sample_manifest());
  for (size_t size = 0; size < good.size(); ++size) REQUIRE_FALSE(decode_metadata_file(good.substr(0, size)).is_ok());
  EXPECT_CODE(kNotFound, decode_metadata_file(good + "x"));
  EXPECT_CODE(kNotFound, decode_metadata_file(""));
  EXPECT_CODE(kNotFound, decode_metadata_file(std::string(1000, '.')));
  // Bytes removed at the front leave the trailer whole, but it stores the length.
  EXPECT_FAILURE(kCorrupt, "does not describe a file of this length", decode_metadata_file(good.substr(1)));
}

TEST_CASE("metadata_file: a newer version is told from damage") {
  std::string file = encode_metadata_file(test::sample_manifest());
  file[file.size() - 16] = 2;
  EXPECT_FAILURE(kVersion, "version 2", decode_metadata_file(file));
}

TEST_CASE("metadata_file: trailer and manifest of two saves do not go together") {
  Manifest manifest = test::sample_manifest();
  const std::string one = encode_metadata_file(manifest);
  manifest.save_id[0] ^= 1;
  const std::string other = encode_metadata_file(manifest);
  REQUIRE(one.size() == other.size());
  const size_t tail = one.size() - kMetadataTrailerBytes;
  EXPECT_CODE(kCorrupt, decode_metadata_file(one.substr(0, tail) + other.substr(tail)));
}

TEST_CASE("metadata_file: the pickle carries the save id and keeps the order of the state dict") {
  const std::string pickle = metadata_pickle(test::sample_manifest());
  CHECK(test::contains(pickle, "bcp1-0102030405060708090a0b0c0d0e0f10"));
  CHECK(pickle.find("layer.weight") < pickle.find("layer.empty"));
  CHECK(pickle.find("layer.empty") < pickle.find("extra"));
  CHECK(pickle.find("extra") < pickle.find("layer.opaque"));
}

/// Everything that makes opcodes differ: names that are words of the pickle, memo entries beyond one byte, integers of
/// all lengths, more than three dims, chunks before and after bytes items.
Manifest crowded_manifest() {
  Manifest manifest = test::sample_manifest();
  manifest.items.clear();
  for (uint32_t f = 2; f < 300; ++f) {
    FileEntry file = manifest.files[0];
    file.id.rank = f;
    file.name = data_file_name(file.id);
    manifest.files.push_back(file);
  }
  std::vector<std::string> names = {"", "chunks", "fqn", "index", "length", "offset", "sizes", manifest.files[7].name};
  for (int n = 0; n < 300; ++n) names.push_back(base::text("layers.", 1000 + n, ".weight"));
  std::sort(names.begin(), names.end());
  for (size_t n = 0; n < names.size(); ++n) {
    Item item;
    item.fqn = names[n];
    item.ordinal = static_cast<uint32_t>((n + names.size() / 2) % names.size());
    item.is_tensor = n % 5 != 1;
    const size_t num_dims = item.is_tensor ? n % 7 : 0;
    item.tensor.dtype = item.is_tensor ? tensor::DType::kFloat16 : tensor::DType::kNone;
    item.tensor.sizes = tensor::Dims(num_dims, int64_t{1} << 40);
    for (size_t c = 0; c < (item.is_tensor ? n % 4 * 100 : 1); ++c) {
      const auto number = static_cast<int64_t>(n * 131 + c);
      Chunk chunk{{tensor::Dims(num_dims, number << (c % 30)), tensor::Dims(num_dims, number)}, {}};
      chunk.record = {item.is_tensor ? RecordKind::kTensor : RecordKind::kBytes,
                      tensor::DType::kFloat16,
                      static_cast<uint32_t>(number % 300),
                      number << (c % 40),
                      number,
                      number + 64,
                      number};
      item.chunks.push_back(std::move(chunk));
    }
    manifest.items.push_back(std::move(item));
  }
  return manifest;
}

TEST_CASE("metadata_file: the bytes of version 1 stay what they are") {
  const std::string file = encode_metadata_file(crowded_manifest());
  CHECK(file.size() == 8605735);
  CHECK(base::crc32(0, file.data(), file.size()) == 0x533361A0u);
}

TEST_CASE("metadata_file: a trailer that describes more than any file is damage") {
  const std::string file = encode_metadata_file(test::sample_manifest());
  std::string tail = file.substr(file.size() - kMetadataTrailerBytes);
  const int64_t lengths[2] = {0, INT64_MAX};
  std::memcpy(&tail[16], lengths, sizeof lengths);
  const uint32_t crc = crc_without_field(tail, 56);
  std::memcpy(&tail[56], &crc, sizeof crc);
  EXPECT_CODE(kCorrupt, decode_metadata_trailer(tail, static_cast<int64_t>(file.size())));
}

}  // namespace
}  // namespace bytecheckpoint::format
