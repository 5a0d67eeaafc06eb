// SPDX-License-Identifier: Apache-2.0
#include "csrc/staging/changes.h"

#include <doctest/doctest.h>

#include <cstring>
#include <limits>
#include <vector>

#include "tests/cpp/random_box.h"

namespace bytecheckpoint::staging {
namespace {

using tensor::Box;
using tensor::Dims;
using tensor::DType;
using test::Random;
using test::RandomMemory;

constexpr int64_t kNoLimit = std::numeric_limits<int64_t>::max();

int64_t numel_of(const Dims& sizes) {
  int64_t numel = 0;
  REQUIRE(tensor::checked_numel(sizes, &numel));
  return numel;
}

std::vector<uint8_t> row_major(const tensor::StridedView& view) {
  const int64_t itemsize = tensor::find_dtype(view.dtype)->itemsize_bytes;
  std::vector<uint8_t> bytes;
  test::for_each_index(view.sizes, [&](const Dims& index) {
    const uint8_t* element = view.data + test::dot(index, view.strides_bytes);
    bytes.insert(bytes.end(), element, element + itemsize);
  });
  return bytes;
}

struct Written {
  std::vector<uint8_t> positions, values;
};

Written write_all(const Changes& changes, size_t number) {
  Written written;
  const auto count = static_cast<size_t>(changes.count(number));
  written.positions.resize(count * static_cast<size_t>(changes.position_bytes(number)));
  written.values.resize(count * static_cast<size_t>(changes.itemsize_bytes(number)));
  changes.write(number, written.positions.data(), written.values.data());
  return written;
}

uint32_t position_of(const Written& written, size_t number) {
  uint32_t position = 0;
  std::memcpy(&position, written.positions.data() + number * 4, 4);
  return position;
}

/// A view of contiguous bytes of one dim.
tensor::StridedView view_of(std::vector<uint8_t>* bytes, DType dtype) {
  const int64_t itemsize = tensor::find_dtype(dtype)->itemsize_bytes;
  return {bytes->data(), dtype, {static_cast<int64_t>(bytes->size()) / itemsize}, {itemsize}};
}

TEST_CASE("changes: those that are found, written over the copy, give the tensor") {
  Random random(31);
  for (int round = 0; round < 1500; ++round) {
    std::vector<RandomMemory> memories;
    std::vector<std::vector<uint8_t>> copies;
    std::vector<Compared> compared;
    std::vector<std::vector<uint32_t>> expected;
    const auto num_tensors = static_cast<size_t>(test::draw(&random, 1, 3));
    for (size_t t = 0; t < num_tensors; ++t) {
      const DType dtype = test::draw_plain_dtype(&random);
      const int64_t itemsize = tensor::find_dtype(dtype)->itemsize_bytes;
      const Dims sizes = test::draw_sizes(&random, 4, 6);
      memories.push_back(test::draw_memory(&random, sizes, itemsize, true));
      const tensor::StridedView view{memories.back().data(), dtype, sizes, memories.back().strides_bytes};
      copies.push_back(row_major(view));
      expected.emplace_back();
      for (int64_t i = 0; i < numel_of(sizes); ++i) {
        if (test::draw(&random, 0, 3) != 0) continue;
        copies.back()[static_cast<size_t>(i * itemsize + test::draw(&random, 0, itemsize - 1))] ^= 0x80;
        expected.back().push_back(static_cast<uint32_t>(i));
      }
      compared.push_back({view, nullptr});
    }
    for (size_t t = 0; t < num_tensors; ++t) compared[t].before = copies[t].data();
    const auto changes = Changes::find(compared, static_cast<int>(test::draw(&random, 1, 3)), kNoLimit);
    REQUIRE(changes.has_value());
    REQUIRE(changes->num_tensors() == num_tensors);
    for (size_t t = 0; t < num_tensors; ++t) {
      const Written written = write_all(*changes, t);
      REQUIRE(changes->count(t) == static_cast<int64_t>(expected[t].size()));
      REQUIRE(changes->position_bytes(t) == 4);
      for (size_t i = 0; i < expected[t].size(); ++i) REQUIRE(position_of(written, i) == expected[t][i]);
      const Dims& sizes = compared[t].now.sizes;
      Dims strides = tensor::row_major_strides(sizes);
      for (int64_t& stride : strides) stride *= changes->itemsize_bytes(t);
      const Patch patch{tensor::whole(sizes),
                        written.positions.data(),
                        4,
                        written.values.data(),
                        changes->count(t),
                        tensor::whole(sizes),
                        {copies[t].data(), compared[t].now.dtype, sizes, strides}};
      REQUIRE(check_positions(patch).is_ok());
      apply_patches({patch}, 2);
      REQUIRE(copies[t] == row_major(compared[t].now));
    }
  }
}

TEST_CASE("changes: a tensor of many stretches and blocks, at its edges") {
  for (const DType dtype : {DType::kInt8, DType::kBFloat16, DType::kFloat32, DType::kInt64, DType::kComplex128}) {
    const int64_t itemsize = tensor::find_dtype(dtype)->itemsize_bytes;
    const int64_t numel = ((int64_t{3} << 20) + 4096) / itemsize + 3;
    std::vector<uint8_t> now(static_cast<size_t>(numel * itemsize), 7), before = now;
    const int64_t stretch = (int64_t{1} << 20) / itemsize, block = 4096 / itemsize;
    const std::vector<int64_t> changed = {0,           1,           block - 1,       block,     stretch - 1, stretch,
                                          stretch + 1, 2 * stretch, 3 * stretch - 1, numel - 2, numel - 1};
    for (const int64_t i : changed) now[static_cast<size_t>(i * itemsize)] = 8;
    const auto changes = Changes::find({{view_of(&now, dtype), before.data()}}, 2, kNoLimit);
    REQUIRE(changes.has_value());
    REQUIRE(changes->count(0) == static_cast<int64_t>(changed.size()));
    const Written written = write_all(*changes, 0);
    for (size_t i = 0; i < changed.size(); ++i) CHECK(position_of(written, i) == changed[i]);
  }
}

TEST_CASE("changes: bits are compared, not numbers") {
  const std::vector<float> numbers = {0.0F, 1.0F, 2.0F};
  std::vector<uint8_t> now(12), before(12);
  std::memcpy(before.data(), numbers.data(), 12);
  now = before;
  now[3] = 0x80;  // -0.0
  const uint32_t quiet = 0x7fc00001, other = 0x7fc00002;
  std::memcpy(now.data() + 4, &quiet, 4);
  std::memcpy(before.data() + 4, &other, 4);
  std::memcpy(now.data() + 8, &quiet, 4);
  std::memcpy(before.data() + 8, &quiet, 4);
  const auto changes = Changes::find({{view_of(&now, DType::kFloat32), before.data()}}, 1, kNoLimit);
  REQUIRE(changes.has_value());
  CHECK(changes->count(0) == 2);
}

TEST_CASE("changes: the search is given up once there are too many") {
  std::vector<uint8_t> now(2000, 1), before(2000, 0);
  const tensor::StridedView view = view_of(&now, DType::kInt16);
  CHECK(!Changes::find({{view, before.data()}}, 2, 5999).has_value());
  CHECK(Changes::find({{view, before.data()}}, 2, 6000).has_value());
  CHECK(Changes::find({}, 2, 0).has_value());
}

TEST_CASE("changes: applied to another box, they reach what is in it and nothing else") {
  Random random(32);
  for (int round = 0; round < 3000; ++round) {
    const Dims shape = test::draw_sizes(&random, 4, 6);
    const Box from = test::draw_box(&random, shape), to = test::draw_box(&random, shape);
    const DType dtype = test::draw_plain_dtype(&random);
    const int64_t itemsize = tensor::find_dtype(dtype)->itemsize_bytes;
    RandomMemory memory = test::draw_memory(&random, to.sizes, itemsize, false);
    const tensor::StridedView view{memory.data(), dtype, to.sizes, memory.strides_bytes};
    std::vector<uint8_t> wanted = row_major(view);
    const bool is_wide = test::draw(&random, 0, 1) == 1;
    std::vector<uint8_t> positions, values;
    int64_t count = 0, position = 0;
    test::for_each_index(from.sizes, [&](const Dims& index) {
      const int64_t here = position++;
      if (test::draw(&random, 0, 1) == 0) return;
      const auto* bytes = reinterpret_cast<const uint8_t*>(&here);  // little-endian, as what is stored
      positions.insert(positions.end(), bytes, bytes + (is_wide ? 8 : 4));
      std::vector<uint8_t> value(static_cast<size_t>(itemsize));
      for (uint8_t& byte : value) byte = static_cast<uint8_t>(random());
      values.insert(values.end(), value.begin(), value.end());
      ++count;
      Dims in_to(index.size());
      bool is_in = true;
      for (size_t d = 0; d < index.size(); ++d) {
        in_to[d] = index[d] + from.offsets[d] - to.offsets[d];
        is_in = is_in && in_to[d] >= 0 && in_to[d] < to.sizes[d];
      }
      if (!is_in) return;
      const int64_t at = test::dot(in_to, tensor::row_major_strides(to.sizes)) * itemsize;
      std::memcpy(wanted.data() + at, value.data(), value.size());
    });
    const Patch patch{from, positions.data(), is_wide ? 8 : 4, values.data(), count, to, view};
    REQUIRE(check_positions(patch).is_ok());
    apply_patches({patch}, 2);
    REQUIRE(row_major(view) == wanted);
  }
}

TEST_CASE("changes: positions that do not ascend, or lie outside of the box, are refused") {
  std::vector<uint8_t> memory(16);
  const auto status_of = [&](std::vector<uint32_t> positions) {
    const std::vector<uint8_t> values(positions.size() * 4);
    const Patch patch{{{0}, {4}},
                      reinterpret_cast<const uint8_t*>(positions.data()),
                      4,
                      values.data(),
                      static_cast<int64_t>(positions.size()),
                      {{0}, {4}},
                      view_of(&memory, DType::kFloat32)};
    return check_positions(patch);
  };
  CHECK(status_of({0, 1, 2, 3}).is_ok());
  CHECK(status_of({}).is_ok());
  CHECK(status_of({0, 4}).code() == base::Code::kCorrupt);
  CHECK(status_of({1, 1}).code() == base::Code::kCorrupt);
  CHECK(status_of({2, 1}).code() == base::Code::kCorrupt);
  const uint64_t huge = ~uint64_t{0};
  const Patch patch{{{0}, {4}}, reinterpret_cast<const uint8_t*>(&huge), 8, memory.data(), 1,
                    {{0}, {4}}, view_of(&memory, DType::kFloat32)};
  CHECK(check_positions(patch).code() == base::Code::kCorrupt);
}

TEST_CASE("changes: positions of large boxes have 8 bytes") {
  CHECK(position_bytes(0) == 4);
  CHECK(position_bytes(int64_t{1} << 32) == 4);
  CHECK(position_bytes((int64_t{1} << 32) + 1) == 8);
}

}  // namespace
}  // namespace bytecheckpoint::staging
