// SPDX-License-Identifier: Apache-2.0
#include "csrc/staging/dequantize.h"

#include <doctest/doctest.h>

#include <algorithm>
#include <cstring>
#include <ctime>
#include <numeric>
#include <string>
#include <vector>

#include "csrc/tensor/small_floats.h"
#include "tests/cpp/random_box.h"

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
  for (int round = 0; round < 2000; ++round) {
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
      REQUIRE(got == value * one.scales[static_cast<size_t>(scale)]);
    });
  }
}

TEST_CASE("dequantize: how fast" * doctest::skip()) {
  const int64_t rows = 4096, columns = 7168;
  std::vector<uint8_t> codes(rows * columns), out(4 * rows * columns);
  for (size_t i = 0; i < codes.size(); ++i) codes[i] = static_cast<uint8_t>(i * 2654435761u >> 24);
  std::vector<float> scales(32 * 224, 0.125f);
  std::vector<uint8_t> exponents(codes.size() / 16, 120);
  ValueTables tables;
  const auto run = [&](const std::string& name, DType dtype, DType values, CodeLayout layout, bool turns) {
    layout.kind.values = values;
    const int64_t columns_there = dtype == DType::kFloat4E2M1FNX2 ? 2 * columns : columns;
    const int64_t size = tensor::find_dtype(values)->itemsize_bytes;
    WantedCodes wanted{0, {rows, columns_there}, {columns_there, 1}, {columns_there * size, size}, out.data()};
    if (turns) wanted.memory_strides = {size, rows * size};
    const uint8_t* of = dtype == DType::kFloat4E2M1FNX2 ? exponents.data() : reinterpret_cast<uint8_t*>(scales.data());
    const Dequantizer dequantizer(layout, wanted);
    double best = 1e9;
    for (int round = 0; round < 5; ++round) {
      const auto begin = std::clock();
      const auto bytes = static_cast<int64_t>(codes.size());
      for (int64_t at = 0; at < bytes; at += 8 << 20) {
        const int64_t end = std::min<int64_t>(at + (8 << 20), bytes);
        dequantizer.scatter(codes.data() + at, at, end, of, &tables);
      }
      best = std::min(best, static_cast<double>(std::clock() - begin) / CLOCKS_PER_SEC);
    }
    MESSAGE(name, ": ", static_cast<double>(codes.size()) / best / 1e9, " GB/s of codes, ",
            static_cast<double>(rows * columns_there * size) / best / 1e9, " GB/s of values");
  };
  const CodeLayout fp8{
      {DType::kFloat8E4M3FN, DType::kFloat32, {}}, 0, {{columns, rows, 0, 128, 0, 56}, {1, columns, 0, 128, 0, 1}}};
  const CodeLayout fp4{{DType::kFloat4E2M1FNX2, DType::kUInt8, {}},
                       0,
                       {{2 * columns, rows, 0, 1, 0, 448}, {1, 2 * columns, 0, 32, 0, 1}}};
  run("fp8 to bfloat16", fp8.kind.codes, DType::kBFloat16, fp8, false);
  run("fp8 to float16", fp8.kind.codes, DType::kFloat16, fp8, false);
  run("fp8 to float32", fp8.kind.codes, DType::kFloat32, fp8, false);
  run("fp8 to bfloat16, transposed", fp8.kind.codes, DType::kBFloat16, fp8, true);
  run("mxfp4 to bfloat16", fp4.kind.codes, DType::kBFloat16, fp4, false);
  run("mxfp4 to bfloat16, transposed", fp4.kind.codes, DType::kBFloat16, fp4, true);
}

}  // namespace
}  // namespace bytecheckpoint::staging
