// SPDX-License-Identifier: Apache-2.0
#include "csrc/format/json/json_reader.h"

#include <string>
#include <utility>
#include <vector>

#include "tests/cpp/expect.h"

namespace bytecheckpoint::format {
namespace {

std::string read_string(std::string_view json) {
  JsonReader reader(json);
  std::string out = test::value_of(reader.string());
  EXPECT_OK(reader.end());
  return out;
}

base::Status skipped(std::string_view json) {
  JsonReader reader(json);
  BCP_RETURN_IF_ERROR(reader.skip());
  return reader.end();
}

TEST_CASE("json: strings with all escapes become UTF-8") {
  CHECK(read_string(R"("plain")") == "plain");
  CHECK(read_string(R"(  "a\"\\\/\b\f\n\r\tz" )") == "a\"\\/\b\f\n\r\tz");
  CHECK(read_string(R"("\u0041\u00e9\u20AC")") == "A\u00e9\u20ac");
  CHECK(read_string(R"("\ud83d\ude00")") == "\U0001f600");
  CHECK(read_string("\"\u00e9\"") == "\u00e9");
  CHECK(read_string(R"("\u0000")") == std::string(1, '\0'));
}

TEST_CASE("json: what is no string is refused, at its place") {
  for (const char* json : {"\"open", R"("\x")", R"("\u12")", R"("\ud83d")", R"("\ud83dx")", R"("\ud83d\u0041")",
                           R"("\ude00")", "\"\xff\"", "\"\n\"", "5", "", "\"\\"}) {
    CAPTURE(json);
    JsonReader reader(json);
    const auto read = reader.string();
    REQUIRE(!read.is_ok());
    CHECK(read.status().code() == base::Code::kCorrupt);
    CHECK(read.status().offset() >= 0);
    CHECK(read.status().offset() <= static_cast<int64_t>(std::string_view(json).size()));
  }
}

TEST_CASE("json: integers of 64 bits are exact, and nothing else is an integer") {
  for (const auto& [json, value] : std::vector<std::pair<std::string, int64_t>>{
           {"0", 0}, {"-0", 0}, {" 17", 17}, {"9223372036854775807", INT64_MAX}, {"-9223372036854775808", INT64_MIN}}) {
    JsonReader reader(json);
    CHECK(test::value_of(reader.integer()) == value);
  }
  for (const char* json :
       {"9223372036854775808", "-9223372036854775809", "1.0", "1e3", "01", "-", "+1", "x", "", "\"1\""}) {
    CAPTURE(json);
    JsonReader reader(json);
    EXPECT_CODE(kCorrupt, reader.integer());
  }
}

TEST_CASE("json: objects and arrays are entered and left in turn") {
  JsonReader reader(R"({"a": [1, 2 ,3], "b" : {}, "c": [] } )");
  std::string key;
  EXPECT_OK(reader.begin_object());
  REQUIRE(test::value_of(reader.next_key(&key)));
  CHECK(key == "a");
  EXPECT_OK(reader.begin_array());
  int64_t sum = 0;
  while (test::value_of(reader.next_element())) sum += test::value_of(reader.integer());
  CHECK(sum == 6);
  REQUIRE(test::value_of(reader.next_key(&key)));
  EXPECT_OK(reader.skip());
  REQUIRE(test::value_of(reader.next_key(&key)));
  CHECK(key == "c");
  EXPECT_OK(reader.skip());
  CHECK(!test::value_of(reader.next_key(&key)));
  EXPECT_OK(reader.end());
}

TEST_CASE("json: any value can be skipped, and only values") {
  for (const char* json :
       {"null", "true", "false", "-1.5e+10", "0.1", "1E2", R"({"a": {"b": [null, true, "x", -0]}})"}) {
    CAPTURE(json);
    EXPECT_OK(skipped(json));
  }
  for (const char* json : {"nul", "tru", "[1,]", "[,1]", "{\"a\"}", "{\"a\":}", "{a:1}", "{\"a\":1,}", "[1 2]", "1 2",
                           "-", "1.", "1e", "01", "[", "{", "]", "NaN", "{\"a\":1 \"b\":2}"}) {
    CAPTURE(json);
    EXPECT_CODE(kCorrupt, skipped(json));
  }
}

TEST_CASE("json: nesting has a limit") {
  const size_t most = JsonReader::kMostLevels;
  EXPECT_OK(skipped(std::string(most, '[') + std::string(most, ']')));
  EXPECT_FAILURE(kCorrupt, "levels", skipped(std::string(most + 1, '[') + std::string(most + 1, ']')));
}

}  // namespace
}  // namespace bytecheckpoint::format
