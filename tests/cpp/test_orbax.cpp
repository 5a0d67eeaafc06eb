// SPDX-License-Identifier: Apache-2.0
#include <string>

#include "csrc/format/orbax/orbax_tree.h"
#include "csrc/format/orbax/zarr_array.h"
#include "tests/cpp/expect.h"

namespace bytecheckpoint::format {
namespace {

using tensor::Dims;

std::string zarr2(const std::string& changed, const std::string& to) {
  std::string json = R"({"chunks":[4,3],"compressor":{"id":"zstd","level":1},"dimension_separator":".","dtype":"<f4",)"
                     R"("fill_value":null,"filters":null,"order":"C","shape":[8,7],"zarr_format":2})";
  const size_t at = json.find(changed);
  REQUIRE(at != std::string::npos);
  return json.replace(at, changed.size(), to);
}

std::string zarr3(const std::string& changed, const std::string& to) {
  std::string json =
      R"({"chunk_grid":{"configuration":{"chunk_shape":[4,6]},"name":"regular"},"chunk_key_encoding":{"name":"default"},)"
      R"("codecs":[{"configuration":{"chunk_shape":[4,3],"codecs":[{"configuration":{"endian":"little"},"name":"bytes"},)"
      R"({"configuration":{"level":3},"name":"zstd"}],"index_codecs":[{"name":"bytes"},{"name":"crc32c"}]},)"
      R"("name":"sharding_indexed"}],"data_type":"bfloat16","fill_value":0.0,"node_type":"array","shape":[8,6],)"
      R"("zarr_format":3})";
  const size_t at = json.find(changed);
  REQUIRE(at != std::string::npos);
  return json.replace(at, changed.size(), to);
}

TEST_CASE("zarr: an array of version 2") {
  const ZarrArray array = test::value_of(read_zarr2(zarr2("zarr", "zarr")));
  CHECK(array.dtype == tensor::DType::kFloat32);
  CHECK(array.sizes == Dims{8, 7});
  CHECK(array.num_chunks() == Dims{2, 3});  // the last column of chunks sticks out
  CHECK(array.num_pieces() == Dims{1, 1});
  CHECK(array.piece_bytes() == 48);
  CHECK(array.is_packed);
  CHECK(!array.has_index);
  CHECK(array.name_of_chunk({1, 2}) == "1.2");
  CHECK(array.name_of_chunk({}) == "0");
  CHECK(!test::value_of(read_zarr2(zarr2(R"({"id":"zstd","level":1})", "null"))).is_packed);
  CHECK(test::value_of(read_zarr2(zarr2(R"(_separator":".")", R"(_separator":"/")"))).name_of_chunk({1, 2}) == "1/2");
  CHECK(test::value_of(read_zarr2(zarr2("[8,7]", "[0,7]"))).num_chunks() == Dims{0, 3});
  CHECK(test::value_of(read_zarr2(zarr2(R"("filters":null)", R"("filters":[])"))).is_packed);
  std::string one_dim = zarr2(R"("C")", R"("F")");
  one_dim.replace(one_dim.find("[4,3]"), 5, "[4]").replace(one_dim.find("[8,7]"), 5, "[8]");
  CHECK(test::value_of(read_zarr2(one_dim)).num_chunks() == Dims{2});  // one dim has one order
}

TEST_CASE("zarr: an array of version 3, with an index and without") {
  const ZarrArray array = test::value_of(read_zarr3(zarr3("zarr", "zarr")));
  CHECK(array.dtype == tensor::DType::kBFloat16);
  CHECK(array.num_chunks() == Dims{2, 1});
  CHECK(array.num_pieces() == Dims{1, 2});
  CHECK(array.piece_bytes() == 24);
  CHECK(array.is_packed);
  CHECK(array.has_index);
  CHECK(!array.is_index_first);
  CHECK(array.index_bytes() == 36);
  CHECK(array.name_of_chunk({1, 0}) == "c/1/0");
  CHECK(array.name_of_chunk({}) == "c");
  CHECK(test::value_of(read_zarr3(zarr3(R"(,{"name":"crc32c"})", ""))).index_bytes() == 32);
  const std::string inner = R"([{"configuration":{"chunk_shape":[4,3],"codecs":)", plain = zarr3(inner, "");
  std::string without = plain;
  const size_t rest = without.find(R"(,"index_codecs")"), end = without.find(R"(,"data_type")");
  without.erase(rest, end - rest);
  const ZarrArray simple = test::value_of(read_zarr3(without));
  CHECK(simple.is_packed);
  CHECK(!simple.has_index);
  CHECK(simple.inner_sizes == Dims{4, 6});
}

TEST_CASE("zarr: what is not read is named") {
  EXPECT_FAILURE(kUnsupported, "compressor 'blosc'", read_zarr2(zarr2(R"("id":"zstd")", R"("id":"blosc")")));
  EXPECT_FAILURE(kUnsupported, "dtype '>f4'", read_zarr2(zarr2("<f4", ">f4")));
  EXPECT_FAILURE(kUnsupported, "dtype 'int4'", read_zarr2(zarr2("<f4", "int4")));
  EXPECT_FAILURE(kUnsupported, "order 'F'", read_zarr2(zarr2(R"("C")", R"("F")")));
  EXPECT_FAILURE(kUnsupported, "filter 'delta'",
                 read_zarr2(zarr2(R"("filters":null)", R"("filters":[{"id":"delta"}])")));
  EXPECT_FAILURE(kUnsupported, "codec 'gzip'", read_zarr3(zarr3(R"("zstd")", R"("gzip")")));
  EXPECT_FAILURE(kUnsupported, "codec 'transpose'", read_zarr3(zarr3(R"("sharding_indexed")", R"("transpose")")));
  EXPECT_FAILURE(kUnsupported, "byte order 'big'", read_zarr3(zarr3(R"("little")", R"("big")")));
  EXPECT_FAILURE(kUnsupported, "chunk_grid 'rectilinear'", read_zarr3(zarr3(R"("regular")", R"("rectilinear")")));
  EXPECT_FAILURE(kUnsupported, "node_type 'group'", read_zarr3(zarr3(R"("array")", R"("group")")));
}

TEST_CASE("zarr: numbers that cannot be are refused") {
  for (const char* chunks : {"[4]", "[0,3]", "[-4,3]", "[4,3,1]"}) {
    CAPTURE(chunks);
    EXPECT_CODE(kCorrupt, read_zarr2(zarr2("[4,3]", chunks)));
  }
  EXPECT_CODE(kCorrupt, read_zarr2(zarr2("[8,7]", "[4611686018427387904,7]")));
  EXPECT_CODE(kCorrupt, read_zarr3(zarr3("[4,3]", "[3,3]")));  // pieces that do not fill a chunk
  EXPECT_FAILURE(kUnsupported, "chunks of", read_zarr2(zarr2("[8,7]", "[800000000,7]")));
  EXPECT_CODE(kCorrupt, read_zarr2("{}"));
  EXPECT_CODE(kCorrupt, read_zarr2(zarr2("zarr_format\":2}", "zarr_format\":2} x")));
}

TEST_CASE("zarr: an index, of which each byte counts") {
  const ZarrArray array = test::value_of(read_zarr3(zarr3("zarr", "zarr")));
  // Made by Orbax 0.12.8 of one piece of 57 bytes.
  ZarrArray one = array;
  one.inner_sizes = one.chunk_sizes;
  const std::string stored = std::string(8, '\0') + std::string("\x39\0\0\0\0\0\0\0", 8) + "\x3a\x8f\x01\xc0";
  const auto pieces = test::value_of(read_zarr_index(one, stored, 77));
  REQUIRE(pieces.size() == 1);
  CHECK(pieces[0].offset == 0);
  CHECK(pieces[0].bytes == 57);
  for (size_t i = 0; i < stored.size(); ++i) {
    CAPTURE(i);
    std::string other = stored;
    other[i] ^= 1;
    EXPECT_CODE(kCorrupt, read_zarr_index(one, other, 1 << 30));
  }
  EXPECT_FAILURE(kCorrupt, "57 bytes at 0 of a file of 56 bytes", read_zarr_index(one, stored, 56));
  one.has_index_crc = false;
  CHECK(test::value_of(read_zarr_index(one, std::string(16, '\xff'), 77))[0].bytes == -1);
}

TEST_CASE("orbax: a tree has the names, and what each value is") {
  const auto leaf = [](const std::string& keys, const std::string& type, bool is_skipped) {
    return R"({"key_metadata":[)" + keys + R"(],"value_metadata":{"value_type":")" + type + R"(","skip_deserialize":)" +
           (is_skipped ? "true" : "false") + R"(,"write_shape":[2]}})";
  };
  const std::string list = R"({"key":"opt","key_type":2},{"key":"1","key_type":1})";
  const std::string json = R"({"tree_metadata":{"x":)" + leaf(list, "jax.Array", false) + R"(,"y":)" +
                           leaf(R"({"key":"name","key_type":2})", "string", false) + R"(,"z":)" +
                           leaf(R"({"key":"e","key_type":2})", "Dict", true) + R"(,"n":)" +
                           leaf(R"({"key":"n","key_type":2})", "None", true) + R"(,"t":)" +
                           leaf(R"({"key":"t","key_type":2})", "NamedTuple", true) +
                           R"(},"use_zarr3":true,"use_ocdbt":false,"custom_metadata":null})";
  const OrbaxTree tree = test::value_of(read_orbax_tree(json));
  CHECK(tree.is_zarr3);
  CHECK(!tree.is_in_database);
  REQUIRE(tree.leaves.size() == 5);
  CHECK(tree.leaves[0].kind == OrbaxLeaf::Kind::kEmptyDict);
  CHECK(tree.leaves[1].kind == OrbaxLeaf::Kind::kNone);
  CHECK(tree.leaves[2].kind == OrbaxLeaf::Kind::kString);
  CHECK(tree.leaves[3].name == "opt.1");
  CHECK(tree.leaves[3].kind == OrbaxLeaf::Kind::kArray);
  CHECK(tree.leaves[3].path == std::string("\x08\x02\0\0\0\x05\x03\0\0\0opt\x03\x01\0\0\0\0\0\0\0", 22));
  CHECK(tree.leaves[4].kind == OrbaxLeaf::Kind::kOther);
  CHECK(tree.leaves[4].type == "NamedTuple");
  const std::string twice =
      R"({"tree_metadata":{"x":)" + leaf(list, "a", false) + R"(,"y":)" + leaf(R"({"key":"opt.1"})", "a", false) + "}}";
  EXPECT_FAILURE(kCorrupt, "two values have the name 'opt.1'", read_orbax_tree(twice));
  EXPECT_CODE(kCorrupt, read_orbax_tree(R"({"tree_metadata":{"x":{}}})"));
  EXPECT_FAILURE(kCorrupt, "no 'tree_metadata'", read_orbax_tree(R"({"use_ocdbt":false})"));
  CHECK(test::value_of(read_orbax_tree(R"({"tree_metadata":{},"use_ocdbt":true})")).is_in_database);
  CHECK(test::value_of(read_orbax_strings(R"({"a":"b"})")).at("a") == "b");
  EXPECT_CODE(kCorrupt, read_orbax_strings(R"({"a":5})"));
}

}  // namespace
}  // namespace bytecheckpoint::format
