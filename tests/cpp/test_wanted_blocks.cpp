// SPDX-License-Identifier: Apache-2.0
#include "csrc/planner/wanted_blocks.h"

#include <string>
#include <vector>

#include "tests/cpp/expect.h"
#include "tests/cpp/random_box.h"

namespace bytecheckpoint::planner {
namespace {

constexpr int64_t kBlock = 16;

std::vector<BlockRange> draw_ranges(test::Random* random) {
  std::vector<BlockRange> ranges;
  for (uint32_t file = 0; file < 4; ++file) {
    if (test::draw(random, 0, 2) == 0) continue;
    int64_t position = test::draw(random, 0, 3) * kBlock;
    for (int64_t left = test::draw(random, 0, 4); left > 0; --left) {
      const int64_t end = position + test::draw(random, 1, 300) * kBlock;
      ranges.push_back({file, position, end});
      position = end + test::draw(random, 1, 200) * kBlock;
    }
  }
  return ranges;
}

TEST_CASE("wanted_blocks: merged ranges come back from their bytes, and none from no bytes") {
  test::Random random(31);
  for (int round = 0; round < 500; ++round) {
    const std::vector<BlockRange> ranges = draw_ranges(&random);
    CHECK(test::value_of(decode_ranges(encode_ranges(ranges, kBlock), kBlock)) == ranges);
  }
  CHECK(test::value_of(decode_ranges("", kBlock)).empty());
}

TEST_CASE("wanted_blocks: damaged bytes are refused, or are merged ranges again") {
  test::Random random(32);
  for (int round = 0; round < 3000; ++round) {
    std::string bytes = encode_ranges(draw_ranges(&random), kBlock);
    const auto at = static_cast<size_t>(test::draw(&random, 0, static_cast<int64_t>(bytes.size()) - 1));
    if (test::draw(&random, 0, 1) == 0) {
      bytes[at] = static_cast<char>(test::draw(&random, 0, 255));
    } else {
      bytes.resize(at);
    }
    const auto ranges = decode_ranges(bytes, kBlock);
    if (!ranges.is_ok()) continue;
    for (size_t r = 0; r < ranges.value().size(); ++r) {
      const BlockRange& range = ranges.value()[r];
      REQUIRE(range.begin >= 0);
      REQUIRE(range.begin < range.end);
      if (r == 0) continue;
      const BlockRange& before = ranges.value()[r - 1];
      REQUIRE((before.file < range.file || before.end < range.begin));
    }
    if (!bytes.empty()) CHECK(encode_ranges(ranges.value(), kBlock) == bytes);
  }
}

TEST_CASE("wanted_blocks: blocks that two boxes share are merged, the boxes are kept apart") {
  const std::vector<WantedBox> wanted = {{0, 0, {20}, {1}, 1}, {0, 24, {20}, {1}, 1}};
  const WantedBlocks blocks = find_wanted_blocks(wanted, kBlock);
  CHECK(blocks.bytes_wanted == 40);
  CHECK(blocks.ranges.size() == 2);
  CHECK(blocks.merged() == std::vector<BlockRange>{{0, 0, 48}});
}

TEST_CASE("wanted_blocks: a box of a chunk is where its elements are") {
  test::Random random(23);
  for (int round = 0; round < 300; ++round) {
    const tensor::Dims sizes = test::draw_sizes(&random, 4, 9);
    const tensor::Box box = test::draw_box(&random, sizes);
    const WantedBox wanted = test::value_of(wanted_of_chunk(1, 64, sizes, box, 4));
    const tensor::Dims strides = tensor::row_major_strides(sizes);
    test::for_each_index(box.sizes, [&](const tensor::Dims& index) {
      const int64_t element = test::dot(box.offsets, strides) + test::dot(index, strides);
      REQUIRE(wanted.offset + test::dot(index, wanted.strides_bytes) == 64 + 4 * element);
    });
  }
}

}  // namespace
}  // namespace bytecheckpoint::planner
