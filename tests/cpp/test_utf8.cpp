// SPDX-License-Identifier: Apache-2.0
#include "csrc/base/utf8.h"

#include <doctest/doctest.h>

#include <string>

namespace bytecheckpoint::base {
namespace {

using namespace std::string_literals;  // NOLINT

TEST_CASE("utf8: well-formed is what the standard says") {
  for (const char* good :
       {"", "abcdefghijk", "\x7F", "\xC2\x80", "\xDF\xBF", "\xE0\xA0\x80", "\xED\x9F\xBF", "\xEE\x80\x80",
        "\xEF\xBF\xBF", "\xF0\x90\x80\x80", "\xF4\x8F\xBF\xBF", "12345678\xC3\xA9"}) {
    CHECK(is_utf8(good));
  }
  CHECK(is_utf8("a\0b"s));
  for (const char* bad : {"\x80", "\xBF", "\xC0\x80", "\xC1\xBF", "\xC3", "\xC3z", "\xE0\x9F\xBF", "\xED\xA0\x80",
                          "\xE2\x82", "\xE2\x82z", "\xF0\x8F\xBF\xBF", "\xF4\x90\x80\x80", "\xF5\x80\x80\x80", "\xFF",
                          "12345678\xC3", "1234567\xC3"}) {
    CHECK_FALSE(is_utf8(bad));
  }
}

TEST_CASE("utf8: any bytes are text in Latin-1, and come back") {
  std::string all;
  for (int byte = 0; byte < 256; ++byte) all.push_back(static_cast<char>(byte));
  const std::string utf8 = latin1_to_utf8(all);
  CHECK(is_utf8(utf8));
  CHECK(utf8.size() == 128 + 2 * 128);
  std::string back = "what was there";
  REQUIRE(utf8_to_latin1(utf8, &back));
  CHECK(back == all);
  for (const char* beyond : {"a\xC4\x80", "\xE2\x82\xAC", "\xF0\x9F\x98\x80"})
    CHECK_FALSE(utf8_to_latin1(beyond, &back));
}

}  // namespace
}  // namespace bytecheckpoint::base
