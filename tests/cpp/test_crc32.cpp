// SPDX-License-Identifier: Apache-2.0
#include "csrc/base/crc32.h"

#include <doctest/doctest.h>

#include <algorithm>
#include <random>
#include <string>
#include <vector>

namespace bytecheckpoint::base {
namespace {

/// Bit by bit, as the standard defines it.
uint32_t slow_crc32(uint32_t crc, const uint8_t* bytes, size_t size) {
  crc = ~crc;
  for (size_t i = 0; i < size; ++i) {
    crc ^= bytes[i];
    for (int bit = 0; bit < 8; ++bit) crc = (crc & 1) ? (crc >> 1) ^ 0xEDB88320u : crc >> 1;
  }
  return ~crc;
}

std::vector<uint8_t> random_bytes(size_t size, std::mt19937_64* random) {
  std::vector<uint8_t> bytes(size);
  for (uint8_t& byte : bytes) byte = static_cast<uint8_t>((*random)());
  return bytes;
}

TEST_CASE("crc32: the check value of the gzip polynomial") {
  CHECK(crc32(0, "123456789", 9) == 0xCBF43926u);
  CHECK(crc32(0, "", 0) == 0);
  CHECK(crc32(0x12345678u, nullptr, 0) == 0x12345678u);
}

TEST_CASE("crc32: equal to the bitwise definition for all short lengths and alignments") {
  std::mt19937_64 random(1);
  const auto bytes = random_bytes(256, &random);
  for (size_t begin = 0; begin < 17; ++begin) {
    for (size_t size = 0; size < 80; ++size) {
      REQUIRE(crc32(0, bytes.data() + begin, size) == slow_crc32(0, bytes.data() + begin, size));
      REQUIRE(crc32(0xDEADBEEFu, bytes.data() + begin, size) == slow_crc32(0xDEADBEEFu, bytes.data() + begin, size));
    }
  }
}

TEST_CASE("crc32: every kernel of this CPU agrees with the bitwise definition at all lengths and alignments") {
  std::mt19937_64 random(4);
  const auto bytes = random_bytes(1500, &random);
  std::string names;
  for (const Crc32Kernel& kernel : crc32_kernels()) {
    CAPTURE(kernel.name);
    names += kernel.name + std::string(" ");
    for (size_t size = 0; size < 1400; ++size) {
      const size_t begin = size % 67;
      const auto start = static_cast<uint32_t>(random());
      REQUIRE(~kernel.update(~start, bytes.data() + begin, size) == slow_crc32(start, bytes.data() + begin, size));
    }
    for (size_t begin = 0; begin < 64; ++begin) {
      for (const size_t size : {15u, 16u, 63u, 64u, 65u, 255u, 256u, 511u, 512u, 513u, 767u, 768u, 1040u}) {
        REQUIRE(~kernel.update(~0u, bytes.data() + begin, size) == slow_crc32(0, bytes.data() + begin, size));
      }
    }
  }
  MESSAGE("kernels that ran: " << names);
}

TEST_CASE("crc32: every kernel agrees on long inputs, in one go and in parts") {
  std::mt19937_64 random(5);
  const auto bytes = random_bytes(300'000, &random);
  const uint32_t wanted = crc32_kernels().front().update(~0u, bytes.data(), bytes.size());
  for (const Crc32Kernel& kernel : crc32_kernels()) {
    CAPTURE(kernel.name);
    REQUIRE(kernel.update(~0u, bytes.data(), bytes.size()) == wanted);
    for (int round = 0; round < 20; ++round) {
      uint32_t state = ~0u;
      for (size_t done = 0; done < bytes.size();) {
        const size_t part = std::min<size_t>(random() % 20'000, bytes.size() - done);
        state = kernel.update(state, bytes.data() + done, part);
        done += part;
      }
      REQUIRE(state == wanted);
    }
  }
}

TEST_CASE("crc32: may be taken in any parts") {
  std::mt19937_64 random(2);
  for (int round = 0; round < 200; ++round) {
    const auto bytes = random_bytes(random() % 3000, &random);
    const size_t cut = bytes.empty() ? 0 : random() % (bytes.size() + 1);
    const uint32_t head = crc32(0, bytes.data(), cut);
    REQUIRE(crc32(head, bytes.data() + cut, bytes.size() - cut) == crc32(0, bytes.data(), bytes.size()));
  }
}

TEST_CASE("crc32_combine: joins the CRCs of neighbours") {
  std::mt19937_64 random(3);
  for (int round = 0; round < 500; ++round) {
    const auto bytes = random_bytes(random() % 2000, &random);
    const size_t cut = bytes.empty() ? 0 : random() % (bytes.size() + 1);
    const uint32_t a = crc32(0, bytes.data(), cut);
    const uint32_t b = crc32(0, bytes.data() + cut, bytes.size() - cut);
    REQUIRE(crc32_combine(a, b, bytes.size() - cut) == crc32(0, bytes.data(), bytes.size()));
  }
  CHECK(crc32_combine(0xABCDu, 0, 0) == 0xABCDu);
}

TEST_CASE("crc32_combine: holds for lengths no test can store") {
  // Doubling: the CRC of 2^k zero bytes from that of 2^(k-1), and the same length reached in two other parts.
  std::vector<uint32_t> zeros(61);
  const uint8_t zero = 0;
  zeros[0] = crc32(0, &zero, 1);
  for (size_t k = 1; k < zeros.size(); ++k)
    zeros[k] = crc32_combine(zeros[k - 1], zeros[k - 1], uint64_t{1} << (k - 1));
  for (size_t k = 2; k < zeros.size(); ++k) {
    const uint64_t quarter = uint64_t{1} << (k - 2);
    const uint32_t three = crc32_combine(zeros[k - 2], zeros[k - 1], 2 * quarter);
    CHECK(crc32_combine(three, zeros[k - 2], quarter) == zeros[k]);
    CHECK(crc32_combine(zeros[k - 2], three, 0) == (zeros[k - 2] ^ three));
  }
}

}  // namespace
}  // namespace bytecheckpoint::base
