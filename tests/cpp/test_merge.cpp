// SPDX-License-Identifier: Apache-2.0
#include "csrc/staging/merge.h"

#include <doctest/doctest.h>

#include <cstring>
#include <vector>

#include "tests/cpp/random_box.h"

namespace bytecheckpoint::staging {
namespace {

using tensor::Box;
using tensor::Dims;
using test::Random;
using test::RandomMemory;

int64_t bytes_of(const Dims& sizes, int64_t itemsize) {
  int64_t numel = 0;
  REQUIRE(tensor::checked_numel(sizes, &numel));
  return numel * itemsize;
}

Dims chunk_strides_of(const Dims& sizes, int64_t itemsize) {
  Dims strides = tensor::row_major_strides(sizes);
  for (int64_t& stride : strides) stride *= itemsize;
  return strides;
}

/// Cuts [0, bytes) at random element boundaries.
std::vector<int64_t> draw_cuts(Random* random, int64_t bytes, int64_t itemsize) {
  std::vector<int64_t> cuts = {0};
  while (cuts.back() < bytes) {
    const int64_t left = (bytes - cuts.back()) / itemsize;
    cuts.push_back(cuts.back() +
                   itemsize * test::draw(random, 1, test::draw(random, 0, 1) ? left : std::min<int64_t>(left, 3)));
  }
  return cuts;
}

TEST_CASE("merge: gathering in windows equals copying element by element") {
  Random random(6);
  for (int round = 0; round < 3000; ++round) {
    const int64_t itemsize = int64_t{1} << test::draw(&random, 0, 4);
    const Dims sizes = test::draw_sizes(&random, 4, 6);
    RandomMemory memory = test::draw_memory(&random, sizes, itemsize, true);
    const int64_t bytes = bytes_of(sizes, itemsize);

    std::vector<uint8_t> expected;
    test::for_each_index(sizes, [&](const Dims& index) {
      const uint8_t* element = memory.data() + test::dot(index, memory.strides_bytes);
      expected.insert(expected.end(), element, element + itemsize);
    });
    REQUIRE(static_cast<int64_t>(expected.size()) == bytes);

    const tensor::BoxRuns runs(sizes, tensor::whole(sizes), itemsize, memory.strides_bytes);
    std::vector<uint8_t> gathered;
    const auto cuts = draw_cuts(&random, bytes, itemsize);
    for (size_t c = 0; c + 1 < cuts.size(); ++c) {
      // A separate heap buffer, so that the sanitizer notices a byte too many.
      std::vector<uint8_t> window(static_cast<size_t>(cuts[c + 1] - cuts[c]), 0xAA);
      gather_window(runs, memory.data(), cuts[c], cuts[c + 1], window.data());
      gathered.insert(gathered.end(), window.begin(), window.end());
    }
    REQUIRE(gathered == expected);
  }
}

TEST_CASE("merge: scattering in windows sets the box and nothing else") {
  Random random(7);
  for (int round = 0; round < 3000; ++round) {
    const int64_t itemsize = int64_t{1} << test::draw(&random, 0, 4);
    const Dims chunk = test::draw_sizes(&random, 4, 6);
    const Box box = test::draw_box(&random, chunk);
    RandomMemory memory = test::draw_memory(&random, box.sizes, itemsize, false);
    const int64_t bytes = bytes_of(chunk, itemsize);
    std::vector<uint8_t> stored(static_cast<size_t>(bytes));
    for (uint8_t& byte : stored) byte = static_cast<uint8_t>(random());

    std::vector<uint8_t> expected = memory.bytes;
    const Dims chunk_strides = chunk_strides_of(chunk, itemsize);
    test::for_each_index(box.sizes, [&](const Dims& index) {
      const int64_t from = test::dot(index, chunk_strides) + test::dot(box.offsets, chunk_strides);
      std::memcpy(expected.data() + memory.first + test::dot(index, memory.strides_bytes), stored.data() + from,
                  static_cast<size_t>(itemsize));
    });

    const tensor::BoxRuns runs(chunk, box, itemsize, memory.strides_bytes);
    const auto cuts = draw_cuts(&random, bytes, itemsize);
    std::vector<size_t> order(cuts.size() - 1);
    for (size_t c = 0; c < order.size(); ++c) order[c] = c;
    std::shuffle(order.begin(), order.end(), random);
    for (const size_t c : order) {
      const std::vector<uint8_t> window(stored.begin() + cuts[c], stored.begin() + cuts[c + 1]);
      scatter_window(runs, window.data(), cuts[c], cuts[c + 1], memory.data());
    }
    REQUIRE(memory.bytes == expected);
  }
}

TEST_CASE("merge: a window that does not touch the box changes nothing") {
  std::vector<uint8_t> memory(4, 1);
  const std::vector<uint8_t> window(8, 2);
  const tensor::BoxRuns runs({16}, Box{{8}, {4}}, 1, {1});
  scatter_window(runs, window.data(), 0, 8, memory.data());
  scatter_window(runs, window.data(), 12, 16, memory.data());
  CHECK(memory == std::vector<uint8_t>(4, 1));
}

TEST_CASE("merge: an expanded tensor repeats its elements") {
  const uint8_t row[3] = {1, 2, 3};
  const Dims sizes = {2, 3};
  const tensor::BoxRuns runs(sizes, tensor::whole(sizes), 1, {0, 1});
  uint8_t out[6] = {};
  gather_window(runs, row, 0, 6, out);
  CHECK(std::memcmp(out, "\1\2\3\1\2\3", 6) == 0);
  const tensor::BoxRuns one(sizes, tensor::whole(sizes), 1, {0, 0});
  gather_window(one, row + 2, 0, 6, out);
  CHECK(std::memcmp(out, "\3\3\3\3\3\3", 6) == 0);
}

}  // namespace
}  // namespace bytecheckpoint::staging
