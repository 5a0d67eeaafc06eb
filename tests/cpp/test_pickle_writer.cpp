// SPDX-License-Identifier: Apache-2.0
#include "csrc/format/pickle/pickle_writer.h"

#include <doctest/doctest.h>

#include <limits>
#include <string>

// tests/unit/test_format.py checks from Python, by unpickling, what the opcodes mean. These tests check which are
// chosen.

namespace bytecheckpoint::format {
namespace {

/// Returns the bytes between the protocol header and STOP.
template <class Emit>
std::string body(int protocol, Emit&& emit) {
  PickleWriter writer(protocol);
  emit(&writer);
  const std::string bytes = writer.finish();
  REQUIRE(bytes.size() >= 3);
  CHECK(bytes[0] == '\x80');
  CHECK(bytes[1] == static_cast<char>(protocol));
  CHECK(bytes.back() == '.');
  return bytes.substr(2, bytes.size() - 3);
}

std::string integer(int64_t value) {
  return body(2, [&](PickleWriter* out) { out->integer(value); });
}

TEST_CASE("pickle_writer: an int takes the shortest opcode that holds it") {
  CHECK(integer(0) == std::string("K\0", 2));
  CHECK(integer(255) == "K\xFF");
  CHECK(integer(256) == std::string("M\0\1", 3));
  CHECK(integer(65535) == "M\xFF\xFF");
  CHECK(integer(65536) == std::string("J\0\0\1\0", 5));
  CHECK(integer(-1) == "J\xFF\xFF\xFF\xFF");
  CHECK(integer(std::numeric_limits<int32_t>::min()) == std::string("J\0\0\0\x80", 5));
  CHECK(integer(int64_t{1} << 31) == std::string("\x8a\x08\0\0\0\x80\0\0\0\0", 10));
  CHECK(integer(std::numeric_limits<int64_t>::min()) == std::string("\x8a\x08\0\0\0\0\0\0\0\x80", 10));
}

TEST_CASE("pickle_writer: a float is big-endian") {
  CHECK(body(4, [](PickleWriter* out) { out->real(1.5); }) == std::string("G\x3f\xf8\0\0\0\0\0\0", 9));
}

TEST_CASE("pickle_writer: tuples of ints have opcodes of their own up to three") {
  const auto tuple = [](const tensor::Dims& dims) { return body(2, [&](PickleWriter* out) { out->int_tuple(dims); }); };
  CHECK(tuple({}) == ")");
  CHECK(tuple({1}) == "K\1\x85");
  CHECK(tuple({1, 2}) == "K\1K\2\x86");
  CHECK(tuple({1, 2, 3}) == "K\1K\2K\3\x87");
  CHECK(tuple({1, 2, 3, 4}) == "(K\1K\2K\3K\4t");
}

TEST_CASE("pickle_writer: protocol 4 writes a string once and then recalls it") {
  const std::string twice = body(4, [](PickleWriter* out) {
    out->string("ab");
    out->string("ab");
  });
  CHECK(twice == std::string("\x8c\x02"
                             "ab\x94h\0",
                             7));
  const std::string plain = body(2, [](PickleWriter* out) {
    out->string("ab");
    out->string("ab");
  });
  CHECK(plain == std::string("X\2\0\0\0abX\2\0\0\0ab", 14));
}

TEST_CASE("pickle_writer: the memo goes on beyond 256 entries, and long strings have a wider length") {
  const std::string bytes = body(4, [](PickleWriter* out) {
    for (int i = 0; i < 300; ++i) out->string(std::to_string(i));
    out->string("255");
    out->string("256");
  });
  CHECK(bytes.substr(bytes.size() - 7) == std::string("h\xFFj\0\1\0\0", 7));
  const std::string longer = body(4, [](PickleWriter* out) { out->string(std::string(256, 'x')); });
  CHECK(longer.substr(0, 5) == std::string("X\0\1\0\0", 5));
}

TEST_CASE("pickle_writer: bytes, of which protocol 2 has none, are a call on text") {
  CHECK(body(4, [](PickleWriter* out) { out->bytes("a\xFF"); }) == std::string("B\2\0\0\0a\xFF", 7));
  CHECK(body(2, [](PickleWriter* out) { out->bytes("a\xFF"); }) ==
        std::string("c_codecs\nencode\nX\3\0\0\0a\xC3\xBFX\6\0\0\0latin1\x86R", 37));
}

TEST_CASE("pickle_writer: globals by name in protocol 2, from the stack and memoised in 4") {
  CHECK(body(2, [](PickleWriter* out) { out->global("torch", "Size"); }) == "ctorch\nSize\n");
  const std::string twice = body(4, [](PickleWriter* out) {
    out->global("torch", "Size");
    out->global("torch", "Size");
  });
  CHECK(twice == "\x8c\5torch\x94\x8c\4Size\x94\x93\x94h\2");
}

TEST_CASE("pickle_writer: a string and a global of the same text are not mistaken for each other") {
  const std::string bytes = body(4, [](PickleWriter* out) {
    out->global("a", "b");
    out->string("g:a:b");
    out->string("s:a");
  });
  CHECK(bytes.find("g:a:b") != std::string::npos);
  CHECK(bytes.find("s:a") != std::string::npos);
}

TEST_CASE("pickle_writer: what is repeated is memoised the first time and recalled from then on") {
  const auto say = [](PickleWriter* out) {
    out->global("a", "b");
    out->string("c");
    out->integer(7);
  };
  const auto plain = [&](PickleWriter* out) {
    for (int n = 0; n < 4; ++n) say(out);
    out->string("d");
  };
  const auto repeated = [&](PickleWriter* out) {
    std::string phrase;
    for (int n = 0; n < 4; ++n) out->repeat(&phrase, [&] { say(out); });
    out->string("d");
  };
  for (int protocol : {2, 4}) CHECK(body(protocol, plain) == body(protocol, repeated));
}

TEST_CASE("pickle_writer: the bytes of integers are known beforehand") {
  for (int shift = 0; shift < 64; ++shift) {
    for (int64_t near : {-1, 0, 1}) {
      const int64_t value = static_cast<int64_t>(uint64_t{1} << shift) + (shift == 63 && near < 0 ? 0 : near);
      CHECK(PickleWriter::integer_bytes(value) == static_cast<int64_t>(integer(value).size()));
      for (size_t count : {0, 1, 3, 4, 5, 9}) {
        const tensor::Dims dims(count, value);
        const std::string tuple = body(2, [&](PickleWriter* out) { out->int_tuple(dims); });
        CHECK(PickleWriter::int_tuple_bytes(dims) == static_cast<int64_t>(tuple.size()));
      }
    }
  }
}

}  // namespace
}  // namespace bytecheckpoint::format
