// SPDX-License-Identifier: Apache-2.0
#include "csrc/tensor/strided_view.h"

#include <doctest/doctest.h>

#include "tests/cpp/random_box.h"

namespace bytecheckpoint::tensor {
namespace {

using test::Random;

Dims times(Dims dims, int64_t factor) {
  for (int64_t& value : dims) value *= factor;
  return dims;
}

TEST_CASE("strided_view: a contiguous tensor is one run, however many dims it has") {
  const Dims sizes = {2, 3, 1, 4};
  const BoxRuns runs(sizes, whole(sizes), 4, times(row_major_strides(sizes), 4));
  CHECK(runs.num_runs() == 1);
  CHECK(runs.run_bytes() == 96);
  CHECK(runs.memory_step_bytes() == 4);
  CHECK(runs.begin() == 0);
  CHECK(runs.end() == 96);
}

TEST_CASE("strided_view: a scalar is one run of one element") {
  const BoxRuns runs({}, {{}, {}}, 8, {});
  CHECK(runs.num_runs() == 1);
  CHECK(runs.run_bytes() == 8);
  CHECK(runs.chunk_offset(0) == 0);
  CHECK(runs.memory_offset(0) == 0);
}

TEST_CASE("strided_view: a box without elements has no runs") {
  const BoxRuns runs({4, 5}, {{1, 2}, {0, 2}}, 4, {20, 4});
  CHECK(runs.num_runs() == 0);
  CHECK(runs.end() == runs.begin());
  CHECK(runs.first_run_ending_after(0) == 0);
  CHECK(BoxRuns({0, 3}, whole({0, 3}), 4, {12, 4}).num_runs() == 0);
}

TEST_CASE("strided_view: a column is one run a row, a transposed matrix steps through memory") {
  const BoxRuns column({3, 4}, {{0, 1}, {3, 2}}, 2, {8, 2});
  CHECK(column.num_runs() == 3);
  CHECK(column.run_bytes() == 4);
  CHECK(column.chunk_offset(2) == 18);
  CHECK(column.begin() == 2);
  CHECK(column.end() == 22);
  const BoxRuns transposed({3, 4}, whole({3, 4}), 2, {2, 6});
  CHECK(transposed.num_runs() == 3);
  CHECK(transposed.memory_step_bytes() == 6);
  CHECK(transposed.memory_offset(1) == 2);
}

TEST_CASE("strided_view: runs give every element once, in the order of the chunk") {
  Random random(5);
  for (int round = 0; round < 2000; ++round) {
    const int64_t itemsize = int64_t{1} << test::draw(&random, 0, 4);
    const Dims chunk = test::draw_sizes(&random, 4, 5);
    const Box box = test::draw_box(&random, chunk);
    const Dims strides = test::draw_memory(&random, box.sizes, itemsize, true).strides_bytes;
    const BoxRuns runs(chunk, box, itemsize, strides);

    const Dims chunk_strides = times(row_major_strides(chunk), itemsize);
    int64_t run = 0, at = 0, last_end = -1;
    test::for_each_index(box.sizes, [&](const Dims& index) {
      REQUIRE(run < runs.num_runs());
      if (at == 0) REQUIRE(runs.chunk_offset(run) >= last_end);
      const int64_t in_chunk = test::dot(index, chunk_strides) + test::dot(box.offsets, chunk_strides);
      REQUIRE(runs.chunk_offset(run) + at == in_chunk);
      REQUIRE(runs.memory_offset(run) + at / itemsize * runs.memory_step_bytes() == test::dot(index, strides));
      last_end = in_chunk + itemsize;
      at += itemsize;
      if (at == runs.run_bytes()) {
        ++run;
        at = 0;
      }
    });
    REQUIRE(run == runs.num_runs());
    REQUIRE(at == 0);
    if (run != 0) REQUIRE(runs.end() == last_end);

    for (int look = 0; look < 10; ++look) {
      const int64_t position = test::draw(&random, 0, std::max<int64_t>(runs.end(), 1) + itemsize);
      int64_t expected = 0;
      while (expected < runs.num_runs() && runs.chunk_offset(expected) + runs.run_bytes() <= position) ++expected;
      REQUIRE(runs.first_run_ending_after(position) == expected);
    }
  }
}

TEST_CASE("strided_view: order and span are those of the elements") {
  Random random(31);
  for (int round = 0; round < 2000; ++round) {
    StridedView view;
    view.dtype = DType::kFloat32;
    view.sizes = test::draw_sizes(&random, 4, 4);
    int64_t numel = 1, stride = 4;
    view.strides_bytes.assign(view.sizes.size(), 0);
    for (size_t d = view.sizes.size(); d-- > 0; stride *= std::max<int64_t>(view.sizes[d], 1)) {
      if (test::draw(&random, 0, 9) == 0) stride *= 2;
      view.strides_bytes[d] = stride;
      numel *= view.sizes[d];
    }
    if (test::draw(&random, 0, 2) == 0) std::reverse(view.strides_bytes.begin(), view.strides_bytes.end());
    int64_t expected_span = 0, next = 0;
    bool in_order = true;
    test::for_each_index(view.sizes, [&](const Dims& index) {
      const int64_t at = test::dot(index, view.strides_bytes);
      in_order = in_order && at == next;
      next += 4;
      expected_span = std::max(expected_span, at + 4);
    });
    CHECK(is_row_major(view) == in_order);
    CHECK(span_bytes(view) == (numel == 0 ? 0 : expected_span));
  }
}

}  // namespace
}  // namespace bytecheckpoint::tensor
