// SPDX-License-Identifier: Apache-2.0
#include "csrc/staging/copy_rects.h"

#include <doctest/doctest.h>

#include "tests/cpp/device_memory.h"

namespace bytecheckpoint::staging {
namespace {

using tensor::Dims;
using tensor::DType;
using test::Random;
using test::SampleTensor;

int64_t num_rects(Dims sizes, Dims strides_bytes, int64_t max_pitch_bytes = 1 << 20) {
  return CopyRects({nullptr, DType::kFloat32, std::move(sizes), std::move(strides_bytes)}, max_pitch_bytes).num_rects();
}

TEST_CASE("copy_rects: one for what is contiguous or a matrix with a pitch, more for the rest") {
  CHECK(num_rects({}, {}) == 1);
  CHECK(num_rects({3, 0}, {0, 4}) == 0);
  CHECK(num_rects({3, 4}, {16, 4}) == 1);
  CHECK(num_rects({3, 4}, {32, 4}) == 1);
  CHECK(num_rects({3, 4}, {4, 12}) == 3);      // transposed: each rectangle is one row of the packed side
  CHECK(num_rects({3, 4}, {32, 4}, 31) == 3);  // rows further apart than the largest pitch
  CHECK(num_rects({3, 4}, {-32, 4}) == 3);     // rows go backwards
  CHECK(num_rects({3, 4}, {0, 4}) == 3);       // rows overlap
  CHECK(num_rects({2, 3, 4}, {200, 32, 4}) == 2);
  const CopyRect one = CopyRects({nullptr, DType::kFloat32, {3, 4}, {32, 4}}, 32).rect(0);
  CHECK(one.row_bytes == 16);
  CHECK(one.pitch_bytes == 32);
  CHECK(one.num_rows == 3);
}

TEST_CASE("copy_rects: copied row by row they are the tensor, of any number of dims") {
  Random random(31);
  for (int round = 0; round < 2000; ++round) {
    const int64_t itemsize = int64_t{1} << test::draw(&random, 0, 4);
    const bool many = test::draw(&random, 0, 3) == 0;
    const SampleTensor tensor(&random, test::draw_sizes(&random, many ? 10 : 4, many ? 2 : 6), itemsize, true);
    const CopyRects rects(tensor.view(), test::draw(&random, 0, 1) == 0 ? 1 << 20 : 40);
    std::vector<uint8_t> packed;
    for (int64_t i = 0; i < rects.num_rects(); ++i) {
      const CopyRect rect = rects.rect(i);
      REQUIRE(rect.packed_offset == static_cast<int64_t>(packed.size()));
      REQUIRE(rect.pitch_bytes >= rect.row_bytes);
      for (int64_t row = 0; row < rect.num_rows; ++row) {
        const uint8_t* first = tensor.view().data + rect.memory_offset + row * rect.pitch_bytes;
        packed.insert(packed.end(), first, first + rect.row_bytes);
      }
    }
    REQUIRE(packed == tensor.packed());
  }
}

}  // namespace
}  // namespace bytecheckpoint::staging
