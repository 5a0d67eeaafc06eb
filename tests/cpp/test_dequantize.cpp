// SPDX-License-Identifier: Apache-2.0
#include "csrc/staging/dequantize.h"

#include <doctest/doctest.h>

#include <algorithm>
#include <cstring>
#include <numeric>
#include <vector>

#include "csrc/tensor/small_floats.h"
#include "tests/cpp/random_box.h"
#include "tests/cpp/rounds.h"

namespace bytecheckpoint::staging {
namespace {

using tensor::Dims;
using tensor::DType;
using test::draw;
using test::Random;

constexpr DType kCodes[] = {DType::kFloat8E4M3FN, DType::kFloat8E5M2, DType::kFloat4E2M1FNX2};

/// A quantized tensor with all of its scales, and a box of it that is wanted with its dims in any order.
struct Case {
  CodeLayout layout;
  std::vector<uint8_t> record;
  std::vector<float> scales;
  Dims sizes, blocks, scale_strides;
  tensor::Box box;
  std::vector<size_t> order;  // of the dims in memory

  explicit Case(Random* random) {
    layout.kind.codes = kCodes[draw(random, 0, 2)];
    layout.kind.scales = DType::kFloat32;
    layout.kind.values = DType::kFloat32;
    sizes = test::draw_sizes(random, 4, 9);
    if (draw(random, 0, 9) == 0) sizes = {draw(random, 1, 200), draw(random, 1, 200)};  // more than a tile
    const bool is_packed = layout.kind.codes == DType::kFloat4E2M1FNX2;
    if (is_packed) sizes.push_back(2 * draw(random, 1, 40));
    Dims counts;
    for (const int64_t size : sizes) {
      blocks.push_back(draw(random, 1, draw(random, 0, 4) == 0 ? 100 : 12));
      counts.push_back((size + blocks.back() - 1) / blocks.back());
    }
    const Dims strides = tensor::row_major_strides(sizes);
    scale_strides = tensor::row_major_strides(counts);
    for (size_t d = 0; d < sizes.size(); ++d) {
      layout.dims.push_back({strides[d], sizes[d], 0, blocks[d], 0, scale_strides[d]});
    }
    int64_t numel = 0, num_scales = 0;
    REQUIRE(tensor::checked_numel(sizes, &numel));
    REQUIRE(tensor::checked_numel(counts, &num_scales));
    record.resize(static_cast<size_t>(is_packed ? numel / 2 : numel));
    for (uint8_t& byte : record) byte = static_cast<uint8_t>(draw(random, 0, 0x7B));
    scales.resize(static_cast<size_t>(num_scales));
    for (float& scale : scales) scale = static_cast<float>(draw(random, -1000, 1000)) / 64;
    box = test::draw_box(random, sizes);
    order.resize(sizes.size());
    std::iota(order.begin(), order.end(), size_t{0});
    std::shuffle(order.begin(), order.end(), *random);
  }

  uint8_t code(int64_t number) const {
    if (layout.kind.codes != DType::kFloat4E2M1FNX2) return record[static_cast<size_t>(number)];
    return (record[static_cast<size_t>(number / 2)] >> (number % 2 * 4)) & 0xF;
  }
};

TEST_CASE("dequantize: windows of a record into any memory equal the product of each code with its scale") {
  Random random(17);
  ValueTables tables;
  for (int round = 0; round < test::rounds(2000); ++round) {
    const Case one(&random);
    WantedCodes wanted;
    Dims in_memory(one.sizes.size());
    for (size_t d = 0; d < one.order.size(); ++d) in_memory[d] = one.box.sizes[one.order[d]];
    const Dims memory_strides = tensor::row_major_strides(in_memory);
    wanted.memory_strides = Dims(one.sizes.size());
    for (size_t d = 0; d < one.order.size(); ++d) wanted.memory_strides[one.order[d]] = 4 * memory_strides[d];
    for (size_t d = 0; d < one.sizes.size(); ++d) {
      wanted.strides.push_back(one.layout.dims[d].stride);
      wanted.first += one.box.offsets[d] * one.layout.dims[d].stride;
    }
    wanted.sizes = one.box.sizes;
    int64_t numel = 0;
    REQUIRE(tensor::checked_numel(one.box.sizes, &numel));
    std::vector<float> memory(static_cast<size_t>(numel), -1.0f);
    wanted.memory = reinterpret_cast<uint8_t*>(memory.data());
    const Dims strides = wanted.memory_strides;
    const Dequantizer dequantizer(one.layout, wanted);
    const auto bytes = static_cast<int64_t>(one.record.size());
    for (int64_t begin = 0; begin < bytes;) {
      const int64_t end = std::min(bytes, begin + draw(&random, 1, draw(&random, 0, 1) ? bytes : 7));
      // A copy of its own, so that a sanitizer sees what is read outside of it.
      const std::vector<uint8_t> window(one.record.begin() + begin, one.record.begin() + end);
      dequantizer.scatter(window.data(), begin, end, reinterpret_cast<const uint8_t*>(one.scales.data()), &tables);
      begin = end;
    }
    bool are_equal = true;
    test::for_each_index(one.box.sizes, [&](const Dims& index) {
      int64_t number = 0, scale = 0, at = 0;
      for (size_t d = 0; d < index.size(); ++d) {
        const int64_t in_tensor = one.box.offsets[d] + index[d];
        number += in_tensor * one.layout.dims[d].stride;
        scale += in_tensor / one.blocks[d] * one.scale_strides[d];
        at += index[d] * strides[d];
      }
      const float value = tensor::values_of_codes(one.layout.kind.codes)[one.code(number)];
      float got;
      std::memcpy(&got, reinterpret_cast<const uint8_t*>(memory.data()) + at, sizeof got);
      are_equal &= got == value * one.scales[static_cast<size_t>(scale)];
    });
    REQUIRE(are_equal);
  }
}

}  // namespace
}  // namespace bytecheckpoint::staging
