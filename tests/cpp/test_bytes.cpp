// SPDX-License-Identifier: Apache-2.0
#include "csrc/base/bytes.h"

#include <doctest/doctest.h>

#include <limits>
#include <string>

namespace bytecheckpoint::base {
namespace {

constexpr int64_t kMax = std::numeric_limits<int64_t>::max();

TEST_CASE("bytes: ids go to hex digits and back") {
  Id id;
  for (size_t i = 0; i < id.size(); ++i) id[i] = static_cast<uint8_t>(17 * i + 1);
  const std::string digits = to_hex(id);
  CHECK(digits ==
        "01122334455667788"
        "99aabbccddeef00");
  Id back{};
  REQUIRE(id_from_hex(digits, &back));
  CHECK(back == id);
}

TEST_CASE("bytes: only 32 lower-case hex digits are an id, and a refusal leaves the id alone") {
  Id id{};
  id[0] = 7;
  const std::string good(32, 'a');
  CHECK_FALSE(id_from_hex("", &id));
  CHECK_FALSE(id_from_hex(good.substr(1), &id));
  CHECK_FALSE(id_from_hex(good + "a", &id));
  CHECK_FALSE(id_from_hex(std::string(32, 'A'), &id));
  for (const char bad : {'g', '/', ':', '`', ' ', '\0', '\xff'}) {
    for (const size_t at : {0, 15, 31}) {
      std::string digits = good;
      digits[at] = bad;
      CHECK_FALSE(id_from_hex(digits, &id));
    }
  }
  CHECK(id[0] == 7);
}

TEST_CASE("bytes: checked arithmetic declines overflow and negative operands") {
  int64_t out = 42;
  CHECK_FALSE(checked_add(kMax, 1, &out));
  CHECK_FALSE(checked_add(-1, 2, &out));
  CHECK_FALSE(checked_add(2, -1, &out));
  CHECK_FALSE(checked_mul(kMax / 2 + 1, 2, &out));
  CHECK_FALSE(checked_mul(-1, 0, &out));
  CHECK(out == 42);
  REQUIRE(checked_add(kMax - 1, 1, &out));
  CHECK(out == kMax);
  REQUIRE(checked_mul(kMax, 1, &out));
  CHECK(out == kMax);
  REQUIRE(checked_mul(kMax, 0, &out));
  CHECK(out == 0);
}

TEST_CASE("bytes: rounding to an alignment") {
  CHECK(align_up(0, 64) == 0);
  CHECK(align_up(1, 64) == 64);
  CHECK(align_up(64, 64) == 64);
  CHECK(align_up(65, 64) == 128);
  CHECK(align_down(63, 64) == 0);
  CHECK(align_down(64, 64) == 64);
  CHECK(align_up((int64_t{1} << 40) + 1, 4096) == (int64_t{1} << 40) + 4096);
}

TEST_CASE("bytes: a reader gives back what a writer took, little-endian") {
  ByteWriter out;
  out.u8(0x12);
  out.u16(0x3456);
  out.u32(0x789ABCDEu);
  out.u64(0x0123456789ABCDEFull);
  out.i64(-2);
  Id id{};
  id[15] = 9;
  out.id(id);
  out.string("name");
  out.string("");
  out.align(8);
  CHECK(out.size() % 8 == 0);
  out.put_u32(3, 0x11223344u);
  CHECK(out.bytes().substr(0, 3) == "\x12\x56\x34");

  ByteReader in(out.bytes());
  CHECK(in.u8() == 0x12);
  CHECK(in.u16() == 0x3456);
  CHECK(in.u32() == 0x11223344u);
  CHECK(in.u64() == 0x0123456789ABCDEFull);
  CHECK(in.i64() == -2);
  CHECK(in.id() == id);
  CHECK(in.string() == "name");
  CHECK(in.string().empty());
  in.skip(in.remaining());
  CHECK(in.ok());
  CHECK(in.position() == out.size());
}

TEST_CASE("bytes: aligning what is aligned adds nothing") {
  ByteWriter out;
  out.align(8);
  CHECK(out.size() == 0);
  out.u8(1);
  out.align(8);
  CHECK(out.size() == 8);
  out.align(8);
  CHECK(out.size() == 8);
}

TEST_CASE("bytes: reading past the end gives zeros and is remembered") {
  ByteReader in("\x01\x02\x03");
  CHECK(in.u32() == 0);
  CHECK_FALSE(in.ok());
  CHECK(in.u16() == 0x0201);  // the bytes that exist are still read
  CHECK_FALSE(in.ok());
  CHECK(in.u64() == 0);
  CHECK(in.id() == Id{});
}

TEST_CASE("bytes: a length field that promises more than there is allocates nothing") {
  ByteWriter out;
  out.u32(0xFFFFFFFFu);
  out.raw("abc");
  ByteReader in(out.bytes());
  CHECK(in.string().empty());
  CHECK_FALSE(in.ok());
  ByteReader again(out.bytes());
  CHECK(again.view(std::numeric_limits<uint64_t>::max()).empty());
  CHECK_FALSE(again.ok());
}

}  // namespace
}  // namespace bytecheckpoint::base
