// SPDX-License-Identifier: Apache-2.0
#include "csrc/staging/element_layout.h"

#include <doctest/doctest.h>

#include <numeric>

#include "tests/cpp/device_memory.h"

namespace bytecheckpoint::staging {
namespace {

using tensor::Dims;
using tensor::DType;
using test::Random;
using test::SampleTensor;

alignas(16) uint8_t g_memory[4096];

ElementLayout layout_at(int64_t offset, DType dtype, Dims sizes, Dims strides_bytes) {
  const auto layout = layout_of({g_memory + offset, dtype, std::move(sizes), std::move(strides_bytes)});
  REQUIRE(layout.has_value());
  return *layout;
}

std::vector<Tile> draw_tiles(Random* random, const ElementLayout& layout) {
  std::vector<Tile> tiles;
  for (int64_t unit = 0; unit < layout.num_units;) {
    const int64_t left = layout.num_units - unit;
    const int64_t count = test::draw(random, 1, test::draw(random, 0, 1) == 0 ? left : std::min<int64_t>(left, 5));
    tiles.push_back({unit, static_cast<uint32_t>(count), 0});
    unit += count;
  }
  std::shuffle(tiles.begin(), tiles.end(), *random);
  return tiles;
}

/// Runs the threads in a random order, because they must not depend on each other.
template <class Move>
void for_each_thread(Random* random, Move&& move) {
  const auto num_threads = static_cast<uint32_t>(test::draw(random, 1, test::draw(random, 0, 1) == 0 ? 3 : 40));
  std::vector<uint32_t> threads(num_threads);
  std::iota(threads.begin(), threads.end(), 0u);
  std::shuffle(threads.begin(), threads.end(), *random);
  for (const uint32_t thread : threads) move(thread, num_threads);
}

TEST_CASE("element_layout: a contiguous tensor is units of 16 bytes and a tail") {
  const ElementLayout even = layout_at(0, DType::kFloat32, {2, 1, 3, 4}, {48, 7, 16, 4});
  CHECK(even.unit_bytes == 16);
  CHECK(even.num_units == 6);
  CHECK(even.tail_bytes == 0);
  CHECK(even.num_dims == 1);
  CHECK(is_contiguous(even));
  const ElementLayout odd = layout_at(16, DType::kBFloat16, {5, 5}, {10, 2});
  CHECK(odd.unit_bytes == 16);
  CHECK(odd.num_units == 3);
  CHECK(odd.tail_bytes == 2);
  CHECK(packed_bytes(odd) == 50);
}

TEST_CASE("element_layout: units are no wider than address, run and strides permit") {
  CHECK(layout_at(4, DType::kFloat32, {8}, {4}).unit_bytes == 4);
  CHECK(layout_at(8, DType::kFloat32, {8}, {4}).unit_bytes == 8);
  CHECK(layout_at(1, DType::kComplex128, {3}, {16}).unit_bytes == 1);  // more than one unit per element
  CHECK(layout_at(0, DType::kFloat32, {3, 6}, {32, 4}).unit_bytes == 8);
  CHECK(layout_at(0, DType::kFloat32, {3, 8}, {32, 4}).unit_bytes == 16);
  CHECK(layout_at(0, DType::kFloat32, {3, 4}, {24, 4}).unit_bytes == 8);
  CHECK(layout_at(512, DType::kFloat32, {3, 4}, {-24, 4}).unit_bytes == 8);
  CHECK(layout_at(0, DType::kFloat32, {3, 4}, {0, 4}).unit_bytes == 16);
  CHECK(layout_at(0, DType::kBFloat16, {8, 8}, {2, 16}).unit_bytes == 2);
}

TEST_CASE("element_layout: scalars, tensors without elements, elements that repeat") {
  const ElementLayout scalar = layout_at(0, DType::kFloat64, {}, {});
  CHECK(scalar.num_units == 1);
  CHECK(scalar.unit_bytes == 8);
  CHECK(scalar.num_dims == 0);
  CHECK(offset_of(scalar, 0) == 0);
  CHECK(is_contiguous(scalar));

  const auto empty = layout_of({nullptr, DType::kFloat64, {4, 0, 3}, {0, 24, 8}});
  REQUIRE(empty.has_value());
  CHECK(empty->num_units == 0);
  CHECK(packed_bytes(*empty) == 0);

  const ElementLayout repeated = layout_at(0, DType::kFloat32, {3, 5}, {0, 0});
  CHECK(repeated.num_dims == 1);
  CHECK(repeated.num_units == 15);
  CHECK(offset_of(repeated, 14) == 0);
  CHECK(!is_contiguous(repeated));
}

TEST_CASE("element_layout: eight dims are what there is room for") {
  const auto of_dims = [](size_t num_dims, int64_t innermost) {
    tensor::StridedView view{g_memory, DType::kInt8, Dims(num_dims, 2), Dims(num_dims)};
    for (size_t d = 0; d < num_dims; ++d) view.strides_bytes[d] = innermost * (int64_t{1} << d);  // column-major
    return layout_of(view);
  };
  CHECK(of_dims(8, 2).has_value());
  CHECK(of_dims(8, 2)->num_dims == 8);
  CHECK(!of_dims(9, 2).has_value());
}

TEST_CASE("element_layout: positions beyond 32 bits") {
  // Nothing is read. The test only computes where units would be.
  const int64_t rows = int64_t{1} << 33;
  const ElementLayout tall = layout_at(0, DType::kInt8, {rows, 3}, {8, 2});
  CHECK(tall.num_units == 3 * rows);
  CHECK(offset_of(tall, 3 * rows - 1) == (rows - 1) * 8 + 4);
  const ElementLayout wide = layout_at(0, DType::kInt8, {3, rows}, {2 * rows + 8, 2});
  CHECK(offset_of(wide, 2 * rows + 5) == 2 * (2 * rows + 8) + 10);
}

TEST_CASE("element_layout: units are the elements in row-major order, at addresses that their size divides") {
  Random random(21);
  for (int round = 0; round < 3000; ++round) {
    const int64_t itemsize = int64_t{1} << test::draw(&random, 0, 4);
    const SampleTensor tensor(&random, test::draw_sizes(&random, 5, 5), itemsize, true);
    const auto layout = layout_of(tensor.view());
    REQUIRE(layout.has_value());
    std::vector<uint8_t> bytes;
    for (int64_t unit = 0; unit < layout->num_units; ++unit) {
      const uint8_t* at = layout->data + offset_of(*layout, unit);
      REQUIRE(reinterpret_cast<uintptr_t>(at) % static_cast<uintptr_t>(layout->unit_bytes) == 0);
      bytes.insert(bytes.end(), at, at + layout->unit_bytes);
    }
    if (layout->tail_bytes > 0) {
      REQUIRE(is_contiguous(*layout));
      const uint8_t* tail = layout->data + layout->num_units * layout->unit_bytes;
      bytes.insert(bytes.end(), tail, tail + layout->tail_bytes);
    }
    REQUIRE(bytes == tensor.packed());
    REQUIRE(packed_bytes(*layout) == static_cast<int64_t>(bytes.size()));
    REQUIRE((layout->num_units == 0) == bytes.empty());
    REQUIRE(layout->tail_bytes < layout->unit_bytes);
  }
}

TEST_CASE("element_layout: tiles gathered by threads are the packed tensor, at any alignment, and nothing else") {
  Random random(22);
  for (int round = 0; round < 3000; ++round) {
    const int64_t itemsize = int64_t{1} << test::draw(&random, 0, 4);
    const SampleTensor tensor(&random, test::draw_sizes(&random, 4, 7), itemsize, true);
    const auto layout = layout_of(tensor.view());
    REQUIRE(layout.has_value());
    const std::vector<uint8_t> expected = tensor.packed();

    const auto before = static_cast<size_t>(test::draw(&random, 16, 48));
    const std::vector<uint8_t> canaries = test::random_bytes(&random, before + expected.size() + 32);
    std::vector<uint8_t> buffer = canaries;
    const std::vector<uint8_t> block = tensor.block();
    int64_t bytes_of_tiles = 0;
    for (const Tile& tile : draw_tiles(&random, *layout)) {
      uint8_t* packed = buffer.data() + before + tile.first_unit * layout->unit_bytes;
      for_each_thread(&random, [&](uint32_t thread, uint32_t num_threads) {
        gather_tile(*layout, tile, packed, thread, num_threads);
      });
      bytes_of_tiles += tile_bytes(*layout, tile);
    }
    std::vector<uint8_t> all = canaries;
    std::copy(expected.begin(), expected.end(), all.begin() + static_cast<std::ptrdiff_t>(before));
    REQUIRE(buffer == all);
    REQUIRE(bytes_of_tiles == static_cast<int64_t>(expected.size()));
    REQUIRE(tensor.block() == block);
  }
}

TEST_CASE("element_layout: tiles scattered by threads set the tensor and nothing else") {
  Random random(23);
  for (int round = 0; round < 3000; ++round) {
    const int64_t itemsize = int64_t{1} << test::draw(&random, 0, 4);
    const SampleTensor tensor(&random, test::draw_sizes(&random, 4, 7), itemsize, false);
    const auto layout = layout_of(tensor.view());
    REQUIRE(layout.has_value());
    const std::vector<uint8_t> content = test::random_bytes(&random, tensor.packed().size());
    const std::vector<uint8_t> expected = tensor.block_with(content);

    const auto before = static_cast<size_t>(test::draw(&random, 0, 15));
    std::vector<uint8_t> buffer(before + content.size());
    std::copy(content.begin(), content.end(), buffer.begin() + static_cast<std::ptrdiff_t>(before));
    for (const Tile& tile : draw_tiles(&random, *layout)) {
      const uint8_t* packed = buffer.data() + before + tile.first_unit * layout->unit_bytes;
      for_each_thread(&random, [&](uint32_t thread, uint32_t num_threads) {
        scatter_tile(*layout, tile, packed, thread, num_threads);
      });
    }
    REQUIRE(tensor.block() == expected);
    REQUIRE(tensor.packed() == content);
  }
}

TEST_CASE("element_layout: no two threads write the same byte") {
  Random random(24);
  for (int round = 0; round < 300; ++round) {
    const int64_t itemsize = int64_t{1} << test::draw(&random, 0, 4);
    const SampleTensor tensor(&random, test::draw_sizes(&random, 3, 7), itemsize, false);
    const auto layout = layout_of(tensor.view());
    REQUIRE(layout.has_value());
    const Tile all{0, static_cast<uint32_t>(layout->num_units), 0};
    if (all.num_units == 0) continue;
    const auto num_threads = static_cast<uint32_t>(test::draw(&random, 1, 9));
    std::vector<int> writers(tensor.packed().size(), 0);
    // A byte that a thread wrote differs from at least one of two fillings.
    for (uint32_t thread = 0; thread < num_threads; ++thread) {
      std::vector<uint8_t> zeros(writers.size(), 0), ones(writers.size(), 0xFF);
      gather_tile(*layout, all, zeros.data(), thread, num_threads);
      gather_tile(*layout, all, ones.data(), thread, num_threads);
      for (size_t i = 0; i < writers.size(); ++i) writers[i] += zeros[i] != 0 || ones[i] != 0xFF;
    }
    REQUIRE(writers == std::vector<int>(writers.size(), 1));
  }
}

}  // namespace
}  // namespace bytecheckpoint::staging
