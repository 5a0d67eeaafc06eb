// SPDX-License-Identifier: Apache-2.0
#include "csrc/format/safetensors/safetensors.h"

#include <string>
#include <utility>
#include <vector>

#include "csrc/base/bytes.h"
#include "tests/cpp/expect.h"

namespace bytecheckpoint::format {
namespace {

using tensor::Dims;
using tensor::DType;

/// Reads a header in front of `data_bytes` bytes.
base::Result<SafetensorsHeader> read(const std::string& json, int64_t data_bytes) {
  return read_safetensors_header(json, kSafetensorsPrefixBytes + static_cast<int64_t>(json.size()) + data_bytes);
}

std::string one(const std::string& fields) {
  return "{\"w\":{" + fields + "}}";
}

TEST_CASE("safetensors: tensors come in the order of their bytes, with offsets in the file") {
  const std::string json =
      R"({"__metadata__":{"format":"pt"},"b":{"dtype":"F32","shape":[2,3],"data_offsets":[2,26]},)"
      R"("a":{"shape":[1],"data_offsets":[0,2],"dtype":"BF16"},"none":{"dtype":"I64","shape":[4,0],"data_offsets":[26,26]}}   )";
  const SafetensorsHeader header = test::value_of(read(json, 26));
  REQUIRE(header.tensors.size() == 3);
  CHECK(header.metadata == R"({"format":"pt"})");
  const int64_t begin = kSafetensorsPrefixBytes + static_cast<int64_t>(json.size());
  CHECK(header.tensors[0].name == "a");
  CHECK(header.tensors[0].offset == begin);
  CHECK(header.tensors[1].name == "b");
  CHECK(header.tensors[1].dtype == DType::kFloat32);
  CHECK(header.tensors[1].sizes == Dims{2, 3});
  CHECK(header.tensors[1].offset == begin + 2);
  CHECK(header.tensors[1].bytes == 24);
  CHECK(header.tensors[2].bytes == 0);
  CHECK(test::value_of(read("{}", 0)).tensors.empty());
}

TEST_CASE("safetensors: two values of 4 bits are one element of torch") {
  const auto header = test::value_of(read(one(R"("dtype":"F4","shape":[3,4],"data_offsets":[0,6])"), 6));
  CHECK(header.tensors[0].sizes == Dims{3, 2});
  EXPECT_FAILURE(kUnsupported, "even", read(one(R"("dtype":"F4","shape":[3],"data_offsets":[0,2])"), 2));
}

TEST_CASE("safetensors: what does not tile the file is damage, and says where") {
  const auto two = [](const char* a, const char* b) {
    return std::string(R"({"a":{"dtype":"U8","shape":[4],"data_offsets":)") + a +
           R"(},"b":{"dtype":"U8","shape":[4],"data_offsets":)" + b + "}}";
  };
  EXPECT_OK(read(two("[0,4]", "[4,8]"), 8));
  EXPECT_FAILURE(kCorrupt, "they overlap", read(two("[0,4]", "[3,7]"), 7));
  EXPECT_FAILURE(kCorrupt, "there is a gap", read(two("[0,4]", "[5,9]"), 9));
  EXPECT_FAILURE(kCorrupt, "there is a gap", read(two("[1,5]", "[5,9]"), 9));
  EXPECT_FAILURE(kCorrupt, "but the file at", read(two("[0,4]", "[4,8]"), 9));
  EXPECT_FAILURE(kCorrupt, "not within", read(two("[0,4]", "[4,8]"), 7));
}

TEST_CASE("safetensors: impossible and unknown fields are refused, and name the tensor") {
  const std::vector<std::pair<std::string, std::string>> faults = {
      {R"("dtype":"F32","shape":[1])", "must have"},
      {R"("dtype":"F32","shape":[1],"data_offsets":[0,4],"x":1)", "unknown field"},
      {R"("dtype":"F32","dtype":"F32","shape":[1],"data_offsets":[0,4])", "twice"},
      {R"("dtype":"F32","shape":[2],"data_offsets":[0,4])", "are 8 bytes, but"},
      {R"("dtype":"F32","shape":[-1],"data_offsets":[0,4])", "negative"},
      {R"("dtype":"F32","shape":[9223372036854775807,4],"data_offsets":[0,4])", "impossible shape"},
      {R"("dtype":"F32","shape":[1],"data_offsets":[4,0])", "not within"},
      {R"("dtype":"F32","shape":[1],"data_offsets":[0])", "two numbers"},
      {R"("dtype":"F32","shape":[1],"data_offsets":[0,4,8])", "more than 2"},
      {R"("dtype":"F32","shape":[1.5],"data_offsets":[0,4])", "integer"},
  };
  for (const auto& [fields, part] : faults) {
    CAPTURE(fields);
    EXPECT_FAILURE(kCorrupt, part, read(one(fields), 4));
    CHECK(test::contains(read(one(fields), 4).status().message(), "'w'"));
  }
  EXPECT_FAILURE(kUnsupported, "F6_E2M3", read(one(R"("dtype":"F6_E2M3","shape":[4],"data_offsets":[0,3])"), 3));
  EXPECT_FAILURE(
      kCorrupt, "'a' is there twice",
      read(
          R"({"a":{"dtype":"U8","shape":[1],"data_offsets":[0,1]},"a":{"dtype":"U8","shape":[1],"data_offsets":[1,2]}})",
          2));
  EXPECT_CODE(kCorrupt, read(R"({"__metadata__":{"a":1}})", 0));
  EXPECT_CODE(kCorrupt, read(R"({"__metadata__":{},"__metadata__":{}})", 0));
  EXPECT_CODE(kCorrupt, read("{} x", 0));
  EXPECT_CODE(kCorrupt, read("[]", 0));
}

TEST_CASE("safetensors: a header must fit the file, and may not be huge") {
  const auto prefix = [](uint64_t length) {
    base::ByteWriter out;
    out.u64(length);
    return out.take();
  };
  CHECK(test::value_of(safetensors_header_bytes(prefix(92), 100)) == 92);
  EXPECT_FAILURE(kCorrupt, "only 100", safetensors_header_bytes(prefix(93), 100));
  EXPECT_CODE(kCorrupt, safetensors_header_bytes(prefix(UINT64_MAX), 100));
  EXPECT_CODE(kCorrupt, safetensors_header_bytes("short", 5));
  EXPECT_CODE(kUnsupported, safetensors_header_bytes(prefix(200'000'000), int64_t{1} << 40));
}

TEST_CASE("safetensors: an index says in which file each tensor is") {
  const auto index = test::value_of(read_safetensors_index(
      R"({"metadata":{"total_size":12.5,"x":[1,{}]},"weight_map":{"b":"m-2.safetensors","a":"m-1.safetensors"}})"));
  REQUIRE(index.size() == 2);
  CHECK(index[0] == std::pair<std::string, std::string>("a", "m-1.safetensors"));
  EXPECT_FAILURE(kCorrupt, "weight_map", read_safetensors_index("{}"));
  EXPECT_FAILURE(kCorrupt, "twice", read_safetensors_index(R"({"weight_map":{"a":"x","a":"y"}})"));
  for (const char* name : {"../x", "/x", "d/x", "..", ".", "", R"(\u0000)"}) {
    CAPTURE(name);
    EXPECT_FAILURE(kCorrupt, "beside the index",
                   read_safetensors_index(std::string(R"({"weight_map":{"a":")") + name + "\"}}"));
  }
}

TEST_CASE("safetensors: names of dtypes are those of the format") {
  CHECK(std::string(safetensors_name(DType::kFloat8E4M3FN)) == "F8_E4M3");
  CHECK(safetensors_name(DType::kComplex128) == nullptr);
}

}  // namespace
}  // namespace bytecheckpoint::format
