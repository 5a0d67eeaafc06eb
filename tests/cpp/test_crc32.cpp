// SPDX-License-Identifier: Apache-2.0
#include "csrc/base/crc32.h"

#include <doctest/doctest.h>

#include <algorithm>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "csrc/base/crc32_kernels.h"

namespace bytecheckpoint::base {
namespace {

/// Computes the CRC bit by bit, as the standard defines it.
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

TEST_CASE("crc32_kernels: the table last, the chosen one first") {
  const auto kernels = crc32_kernels();
  REQUIRE(!kernels.empty());
  CHECK(std::string(kernels.back().name) == "table");
  CHECK(std::string(kernels.front().name) == crc32_kernel_name());
  for (const Crc32Kernel& kernel : kernels) {
    CAPTURE(kernel.name);
    CHECK(kernel.update(0, "123456789", 9) == 0xCBF43926u);
    CHECK(kernel.update(0x12345678u, nullptr, 0) == 0x12345678u);
    // 32 bytes of zeros, 32 bytes of ones, and 32 rising bytes.
    const std::string zeros(32, '\0'), ones(32, '\xFF');
    std::string rising;
    for (char c = 0; c < 32; ++c) rising.push_back(c);
    CHECK(kernel.update(0, zeros.data(), 32) == 0x190A55ADu);
    CHECK(kernel.update(0, ones.data(), 32) == 0xFF6CAB0Bu);
    CHECK(kernel.update(0, rising.data(), 32) == 0x91267E8Au);
  }
}

TEST_CASE("crc32_kernels: each equal to the bitwise definition for all short lengths and alignments") {
  constexpr size_t kMaxSize = 1024, kAlignments = 64;
  std::mt19937_64 random(1);
  const auto buffer = random_bytes(kMaxSize + 2 * kAlignments, &random);
  const uint8_t* bytes = buffer.data() + (kAlignments - reinterpret_cast<uintptr_t>(buffer.data()) % kAlignments);
  const auto kernels = crc32_kernels();
  for (size_t begin = 0; begin < kAlignments; ++begin) {
    const uint32_t initial = begin == 0 ? 0 : static_cast<uint32_t>(random());
    uint32_t expected = initial;
    for (size_t size = 0; size <= kMaxSize; ++size) {
      for (const Crc32Kernel& kernel : kernels) {
        const uint32_t computed = kernel.update(initial, bytes + begin, size);
        if (computed == expected) continue;  // a CHECK for each would take most of the time
        CAPTURE(kernel.name);
        CAPTURE(begin);
        CAPTURE(size);
        REQUIRE(computed == expected);
      }
      expected = slow_crc32(expected, bytes + begin + size, 1);
    }
  }
}

TEST_CASE("crc32_kernels: none reads outside of its bytes") {
  // Allocations are exact, so AddressSanitizer notices a read past either end.
  std::mt19937_64 random(2);
  for (size_t size = 0; size < 600; ++size) {
    const auto bytes = random_bytes(size, &random);
    const auto initial = static_cast<uint32_t>(random());
    const uint32_t expected = slow_crc32(initial, bytes.data(), size);
    for (const Crc32Kernel& kernel : crc32_kernels()) {
      CAPTURE(kernel.name);
      CAPTURE(size);
      REQUIRE(kernel.update(initial, bytes.data(), size) == expected);
    }
  }
}

TEST_CASE("crc32_kernels: megabytes, whole and in any parts") {
  std::mt19937_64 random(3);
  for (const size_t max_size : {size_t{5000}, size_t{100'000}, size_t{3} << 20}) {
    const auto bytes = random_bytes(max_size - random() % 1000, &random);
    const auto initial = static_cast<uint32_t>(random());
    const uint32_t expected = slow_crc32(initial, bytes.data(), bytes.size());
    for (const Crc32Kernel& kernel : crc32_kernels()) {
      CAPTURE(kernel.name);
      CAPTURE(bytes.size());
      CHECK(kernel.update(initial, bytes.data(), bytes.size()) == expected);
      for (int round = 0; round < 4; ++round) {
        uint32_t crc = initial;
        for (size_t done = 0; done < bytes.size();) {
          // Part lengths range from bytes to 512 KiB. Each order of magnitude is equally likely.
          const size_t limit = size_t{1} << (random() % 20);
          const size_t part = std::min<size_t>(bytes.size() - done, random() % limit);
          crc = kernel.update(crc, bytes.data() + done, part);
          done += part;
        }
        CHECK(crc == expected);
      }
    }
  }
}

TEST_CASE("crc32: may be taken in any parts") {
  std::mt19937_64 random(4);
  for (int round = 0; round < 200; ++round) {
    const auto bytes = random_bytes(random() % 3000, &random);
    const size_t cut = bytes.empty() ? 0 : random() % (bytes.size() + 1);
    const uint32_t head = crc32(0, bytes.data(), cut);
    REQUIRE(crc32(head, bytes.data() + cut, bytes.size() - cut) == crc32(0, bytes.data(), bytes.size()));
  }
}

TEST_CASE("crc32_combine: joins the CRCs of neighbours") {
  std::mt19937_64 random(5);
  for (int round = 0; round < 500; ++round) {
    const auto bytes = random_bytes(random() % 2000, &random);
    const size_t cut = bytes.empty() ? 0 : random() % (bytes.size() + 1);
    const uint32_t a = crc32(0, bytes.data(), cut);
    const uint32_t b = crc32(0, bytes.data() + cut, bytes.size() - cut);
    REQUIRE(crc32_combine(a, b, bytes.size() - cut) == crc32(0, bytes.data(), bytes.size()));
  }
  CHECK(crc32_combine(0xABCDu, 0, 0) == 0xABCDu);
}

TEST_CASE("crc32_without_end: takes back what crc32_combine does") {
  for (const uint64_t length : {uint64_t{0}, uint64_t{1}, uint64_t{63}, uint64_t{1} << 20, uint64_t{0xFFFFFFFF},
                                uint64_t{0x100000000}, uint64_t{0xFFFFFFFFFFFFFFFF}}) {
    CHECK(crc32_without_end(crc32_combine(0xDEADBEEFu, 0x12345678u, length), 0x12345678u, length) == 0xDEADBEEFu);
  }
}

TEST_CASE("crc32_combine: equal to appending zero bytes, for every length of a few blocks") {
  // combine(a, crc of n zero bytes, n) is the CRC of a followed by n zero bytes, which grows byte by byte.
  constexpr size_t kMaxLength = 300'000;
  const uint8_t zero = 0;
  const uint32_t a = crc32(0, "123456789", 9);
  uint32_t whole = a, zeros = 0;
  for (size_t n = 0; n <= kMaxLength; ++n) {
    if (crc32_combine(a, zeros, n) != whole) {
      CAPTURE(n);
      REQUIRE(crc32_combine(a, zeros, n) == whole);
    }
    whole = crc32_table(whole, &zero, 1);
    zeros = crc32_table(zeros, &zero, 1);
  }
}

/// Returns a * b modulo the polynomial, bit by bit. x^0 is the top bit.
uint32_t slow_multiply(uint32_t a, uint32_t b) {
  uint32_t product = 0;
  for (; a != 0; a <<= 1) {
    if (a & 0x80000000u) product ^= b;
    b = (b & 1) ? (b >> 1) ^ 0xEDB88320u : b >> 1;
  }
  return product;
}

/// Combines by the definition: one squaring for each bit of the length.
uint32_t slow_combine(uint32_t crc_a, uint32_t crc_b, uint64_t length_b) {
  uint32_t power = 0x00800000u;  // x^8
  for (; length_b != 0; length_b >>= 1) {
    if (length_b & 1) crc_a = slow_multiply(power, crc_a);
    power = slow_multiply(power, power);
  }
  return crc_a ^ crc_b;
}

TEST_CASE("crc32_combine: equal to the definition for any CRCs and any 64-bit length") {
  std::mt19937_64 random(6);
  for (const uint64_t length :
       {uint64_t{0xFFFFFFFEu}, uint64_t{0xFFFFFFFFu}, uint64_t{1} << 32, (uint64_t{1} << 32) + 1,
        uint64_t{0xFFFFFFFF00000000u}, ~uint64_t{0} - 1, ~uint64_t{0}}) {
    CAPTURE(length);
    CHECK(crc32_combine(0xDEADBEEFu, 0x12345678u, length) == slow_combine(0xDEADBEEFu, 0x12345678u, length));
  }
  for (int round = 0; round < 20'000; ++round) {
    const auto a = static_cast<uint32_t>(random()), b = static_cast<uint32_t>(random());
    const uint64_t length = random() >> (random() % 64);
    CAPTURE(length);
    REQUIRE(crc32_combine(a, b, length) == slow_combine(a, b, length));
  }
  // Every bit of both operands of the multiplication is combined with every other.
  for (const uint32_t a : {0xFFFFFFFFu, 0x80000000u, 1u}) {
    for (uint64_t length = 0; length < 256; ++length) CHECK(crc32_combine(a, 0, length) == slow_combine(a, 0, length));
  }
}

TEST_CASE("crc32_combine: holds for lengths no test can store") {
  // Doubling: the CRC of 2^k zero bytes from that of 2^(k-1). The same length is also reached with two other parts.
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

// Computed while this file's globals are constructed, possibly before those of csrc.
const uint32_t kCheckValueOfAGlobal = crc32(0, "123456789", 9);

TEST_CASE("crc32: works while globals are constructed, and from many threads") {
  CHECK(kCheckValueOfAGlobal == 0xCBF43926u);
  std::vector<uint32_t> computed(4);
  std::vector<std::thread> threads;
  for (uint32_t& crc : computed) threads.emplace_back([&crc] { crc = crc32(0, "123456789", 9); });
  for (std::thread& thread : threads) thread.join();
  for (const uint32_t crc : computed) CHECK(crc == 0xCBF43926u);
}

}  // namespace
}  // namespace bytecheckpoint::base
