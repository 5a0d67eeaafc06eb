// SPDX-License-Identifier: Apache-2.0
#include "csrc/base/varint.h"

#include <limits>
#include <random>
#include <vector>

#include "tests/cpp/expect.h"

namespace bytecheckpoint::base {
namespace {

TEST_CASE("varint: numbers of all lengths come back") {
  std::mt19937_64 random(1);
  std::vector<uint64_t> numbers = {0, 1, 127, 128, 16383, 16384, ~uint64_t{0}, ~uint64_t{0} >> 1};
  for (int i = 0; i < 2000; ++i) numbers.push_back(random() >> random() % 64);
  VarintWriter out;
  for (const uint64_t number : numbers) out.number(number);
  const std::string bytes = out.take();
  VarintReader reader(bytes);
  for (const uint64_t number : numbers) REQUIRE(reader.number() == number);
  CHECK(reader.ok());
  CHECK(reader.remaining() == 0);
}

TEST_CASE("varint: a number has one spelling, and no more than 64 bits") {
  for (const std::string& bytes : {std::string("\x80\x00", 2), std::string("\xFF\x80\x00", 3), std::string("\x80"),
                                   std::string(), std::string(9, '\xFF') + "\x02", std::string(10, '\xFF') + "\x01",
                                   std::string(9, '\x80') + std::string(1, '\0')}) {
    VarintReader reader(bytes);
    CHECK(reader.number() == 0);
    CHECK_FALSE(reader.ok());
  }
  const std::string largest = std::string(9, '\xFF') + "\x01";
  VarintReader reader(largest);
  CHECK(reader.number() == ~uint64_t{0});
  CHECK(reader.ok());
}

TEST_CASE("varint: short numbers are read alike with and without bytes behind them") {
  for (int i = 0; i < 1 << 16; ++i) {
    const std::string bytes = {static_cast<char>(i), static_cast<char>(i >> 8), static_cast<char>(i % 251)};
    for (size_t size = 1; size <= 3; ++size) {
      const std::string alone = bytes.substr(0, size);
      const std::string longer = alone + "\x01\x01\x01";
      VarintReader a(alone), b(longer);
      const uint64_t number = b.number();
      if (b.position() > size) continue;  // goes on in the bytes behind
      REQUIRE(a.number() == number);
      REQUIRE(a.ok() == b.ok());
      REQUIRE(a.position() == b.position());
    }
  }
}

TEST_CASE("varint: bytes are skipped if they come next") {
  VarintReader reader("abcd");
  CHECK_FALSE(reader.skip("b"));
  CHECK(reader.skip("ab"));
  CHECK_FALSE(reader.skip("cde"));
  CHECK(reader.rest() == "cd");
  CHECK(reader.skip("cd"));
  CHECK(reader.skip(""));
  CHECK_FALSE(reader.skip("e"));
  CHECK(reader.ok());
}

TEST_CASE("varint: narrower numbers, counts and views fail when they do not fit") {
  VarintWriter out;
  out.number(uint64_t{1} << 63);
  out.number(uint64_t{1} << 32);
  out.number(3);
  out.raw("abcdef");
  const std::string bytes = out.take();
  CHECK(VarintReader(bytes).i64() == 0);
  VarintReader narrow(bytes);
  (void)narrow.number();
  CHECK(narrow.u32() == 0);
  CHECK_FALSE(narrow.ok());
  VarintReader reader(std::string_view(bytes).substr(15));
  CHECK(VarintReader(std::string_view(bytes).substr(15)).count(2) == 3);
  CHECK(reader.count(3) == 0);
  CHECK_FALSE(reader.ok());
  VarintReader view("abc");
  CHECK(view.view(3) == "abc");
  CHECK(view.view(1).empty());
  CHECK(view.u8() == 0);
  CHECK_FALSE(view.ok());
}

}  // namespace
}  // namespace bytecheckpoint::base
