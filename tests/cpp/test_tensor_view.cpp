// SPDX-License-Identifier: Apache-2.0
#include "csrc/planner/tensor_view.h"

#include <numeric>
#include <utility>
#include <vector>

#include "tests/cpp/expect.h"
#include "tests/cpp/random_box.h"

namespace bytecheckpoint::planner {
namespace {

using tensor::Box;
using tensor::Dims;
using test::Random;

/// A tensor with its elements, row-major, and the same as a view of records: what operations do to one they must do to
/// the other.
struct Both {
  std::vector<int64_t> elements;
  TensorView view;
};

using Records = std::vector<std::vector<int64_t>>;

int64_t numel_of(const Dims& sizes) {
  return std::accumulate(sizes.begin(), sizes.end(), int64_t{1}, std::multiplies<>());
}

/// Cuts `sizes` into boxes at random.
std::vector<Box> draw_boxes(Random* random, const Dims& sizes) {
  std::vector<Box> boxes = {tensor::whole(sizes)};
  for (int cuts = 0; cuts < 3; ++cuts) {
    const auto b = static_cast<size_t>(test::draw(random, 0, static_cast<int64_t>(boxes.size()) - 1));
    if (sizes.empty()) break;
    const auto d = static_cast<size_t>(test::draw(random, 0, static_cast<int64_t>(sizes.size()) - 1));
    if (boxes[b].sizes[d] < 2) continue;
    const int64_t at = test::draw(random, 1, boxes[b].sizes[d] - 1);
    Box behind = boxes[b];
    behind.offsets[d] += at;
    behind.sizes[d] -= at;
    boxes[b].sizes[d] = at;
    boxes.push_back(std::move(behind));
  }
  return boxes;
}

/// A tensor of new numbers, stored in random boxes.
Both draw_stored(Random* random, const Dims& sizes, Records* records) {
  Both both;
  both.view.sizes = sizes;
  const int64_t first = records->empty() ? 0 : 1000 * static_cast<int64_t>(records->size());
  both.elements.resize(static_cast<size_t>(numel_of(sizes)));
  std::iota(both.elements.begin(), both.elements.end(), first);
  const Dims strides = tensor::row_major_strides(sizes);
  for (const Box& box : draw_boxes(random, sizes)) {
    both.view.boxes.push_back({box, static_cast<uint32_t>(records->size()), 0, tensor::row_major_strides(box.sizes)});
    std::vector<int64_t>& record = records->emplace_back();
    test::for_each_index(box.sizes, [&](const Dims& index) {
      record.push_back(first + test::dot(index, strides) + test::dot(box.offsets, strides));
    });
  }
  return both;
}

/// Reads a view, element by element. Each must be in one box.
std::vector<int64_t> read(const TensorView& view, const Records& records) {
  std::vector<int64_t> elements(static_cast<size_t>(numel_of(view.sizes)), -1);
  const Dims strides = tensor::row_major_strides(view.sizes);
  for (const ViewedBox& viewed : view.boxes) {
    REQUIRE(tensor::is_inside(viewed.box, view.sizes));
    test::for_each_index(viewed.box.sizes, [&](const Dims& index) {
      const auto at = static_cast<size_t>(test::dot(viewed.box.offsets, strides) + test::dot(index, strides));
      const auto in_record = static_cast<size_t>(viewed.offset + test::dot(index, viewed.strides));
      REQUIRE(elements[at] == -1);
      REQUIRE(in_record < records[viewed.source].size());
      elements[at] = records[viewed.source][in_record];
    });
  }
  return elements;
}

/// The same for elements in memory: what torch would do.
std::vector<int64_t> permuted(const std::vector<int64_t>& elements, const Dims& sizes,
                              const std::vector<size_t>& dims) {
  const Dims strides = tensor::row_major_strides(sizes);
  Dims new_sizes(sizes.size()), new_strides(sizes.size());
  for (size_t d = 0; d < dims.size(); ++d) {
    new_sizes[d] = sizes[dims[d]];
    new_strides[d] = strides[dims[d]];
  }
  std::vector<int64_t> out;
  test::for_each_index(new_sizes, [&](const Dims& index) {
    out.push_back(elements[static_cast<size_t>(test::dot(index, new_strides))]);
  });
  return out;
}

std::vector<int64_t> narrowed(const std::vector<int64_t>& elements, const Dims& sizes, size_t dim, int64_t begin,
                              int64_t length) {
  const Dims strides = tensor::row_major_strides(sizes);
  Dims part = sizes;
  part[dim] = length;
  std::vector<int64_t> out;
  test::for_each_index(part, [&](const Dims& index) {
    out.push_back(elements[static_cast<size_t>(test::dot(index, strides) + begin * strides[dim])]);
  });
  return out;
}

/// Another shape with as many elements: dims are joined and split at random.
Dims draw_shape(Random* random, const Dims& sizes) {
  int64_t left = numel_of(sizes);
  Dims shape;
  while (left > 1 && shape.size() < 4) {
    std::vector<int64_t> divisors;
    for (int64_t d = 1; d <= left; ++d) {
      if (left % d == 0) divisors.push_back(d);
    }
    const auto drawn = static_cast<size_t>(test::draw(random, 0, static_cast<int64_t>(divisors.size()) - 1));
    shape.push_back(divisors[drawn]);
    left /= divisors[drawn];
  }
  if (left > 1 || shape.empty() || test::draw(random, 0, 3) == 0) shape.push_back(left);
  return shape;
}

void change(Random* random, Both* both, Records* records) {
  const Dims sizes = both->view.sizes;
  const auto last_dim = static_cast<int64_t>(sizes.size()) - 1;
  switch (test::draw(random, 0, 4)) {
    case 0: {
      std::vector<size_t> dims(sizes.size());
      std::iota(dims.begin(), dims.end(), size_t{0});
      std::shuffle(dims.begin(), dims.end(), *random);
      both->elements = permuted(both->elements, sizes, dims);
      both->view = test::value_of(permute(both->view, dims));
      break;
    }
    case 1: {
      if (sizes.empty()) return;
      const auto dim = static_cast<size_t>(test::draw(random, 0, last_dim));
      const int64_t begin = test::draw(random, 0, sizes[dim] - 1), length = test::draw(random, 1, sizes[dim] - begin);
      both->elements = narrowed(both->elements, sizes, dim, begin, length);
      both->view = test::value_of(narrow(both->view, dim, begin, length));
      break;
    }
    case 2:
      both->view = test::value_of(reshape(both->view, draw_shape(random, sizes)));
      break;
    case 3: {  // stacking is joining along a new first dim, moved to its place
      if (both->elements.size() > 200) return;
      Both other = draw_stored(random, sizes, records);
      const auto dim = static_cast<size_t>(test::draw(random, 0, last_dim + 1));
      both->view = test::value_of(stack({both->view, other.view}, dim));
      std::vector<int64_t> joined = both->elements;
      joined.insert(joined.end(), other.elements.begin(), other.elements.end());
      Dims stacked = {2};
      std::vector<size_t> dims;
      for (size_t d = 0; d < sizes.size(); ++d) {
        stacked.push_back(sizes[d]);
        dims.push_back(d + 1);
      }
      dims.insert(dims.begin() + static_cast<std::ptrdiff_t>(dim), 0);
      both->elements = permuted(joined, stacked, dims);
      break;
    }
    default: {  // joining along dim 0
      if (sizes.empty() || both->elements.size() > 200) return;
      Dims more = sizes;
      more[0] = test::draw(random, 1, 3);
      Both other = draw_stored(random, more, records);
      both->view = test::value_of(concatenate({both->view, other.view}, 0));
      both->elements.insert(both->elements.end(), other.elements.begin(), other.elements.end());
    }
  }
}

TEST_CASE("tensor_view: any operations, one after the other, are what torch's would be") {
  Random random(31);
  for (int round = 0; round < 3000; ++round) {
    Records records;
    Dims sizes(static_cast<size_t>(test::draw(&random, 0, 4)));
    for (int64_t& size : sizes) size = test::draw(&random, 1, 6);
    Both both = draw_stored(&random, sizes, &records);
    for (int64_t left = test::draw(&random, 1, 6); left > 0; --left) change(&random, &both, &records);
    REQUIRE(read(both.view, records) == both.elements);
  }
}

TEST_CASE("tensor_view: in a record of another order of dims the same elements are found") {
  Random random(32);
  int found = 0;
  for (int round = 0; round < 2000; ++round) {
    Records records;
    Dims sizes(static_cast<size_t>(test::draw(&random, 1, 4)));
    for (int64_t& size : sizes) size = test::draw(&random, 1, 5);
    Both both{{}, {sizes, {{tensor::whole(sizes), 0, 0, tensor::row_major_strides(sizes)}}}};
    records.emplace_back(static_cast<size_t>(numel_of(sizes)));
    std::iota(records[0].begin(), records[0].end(), 0);
    both.elements = records[0];
    for (int64_t left = test::draw(&random, 1, 4); left > 0; --left) change(&random, &both, &records);
    // The first record is stored with its dims reversed.
    Dims strides(sizes.size());
    for (size_t d = 0; d < sizes.size(); ++d) {
      strides[d] = std::accumulate(sizes.begin(), sizes.begin() + d, int64_t{1}, std::multiplies<>());
    }
    std::vector<int64_t> stored(records[0].size());
    const Dims row_major = tensor::row_major_strides(sizes);
    test::for_each_index(sizes, [&](const Dims& index) {
      stored[static_cast<size_t>(test::dot(index, strides))] = test::dot(index, row_major);
    });
    records[0] = stored;
    bool is_all = true;
    for (ViewedBox& viewed : both.view.boxes) {
      if (viewed.source == 0) is_all = is_all && restride(sizes, strides, &viewed);
    }
    if (!is_all) continue;
    ++found;
    REQUIRE(read(both.view, records) == both.elements);
  }
  CHECK(found > 800);  // the others join dims that are not neighbours there
}

TEST_CASE("tensor_view: a chunk that has only a part of the joined dims is cut, not more than needed") {
  // Columns 0 and 1 of [4, 3]: joined with the rows, two elements of each three.
  const TensorView columns{{4, 3}, {{{{0, 0}, {4, 2}}, 0, 0, {2, 1}}, {{{0, 2}, {4, 1}}, 1, 0, {1, 1}}}};
  CHECK(test::value_of(reshape(columns, {12})).boxes.size() == 8);
  // Rows stay whole.
  const TensorView rows{{4, 3}, {{{{0, 0}, {3, 3}}, 0, 0, {3, 1}}, {{{3, 0}, {1, 3}}, 1, 0, {3, 1}}}};
  CHECK(test::value_of(reshape(rows, {12})).boxes.size() == 2);
  CHECK(test::value_of(reshape(rows, {2, 2, 3})).boxes.size() == 3);
}

TEST_CASE("tensor_view: a dim is padded with elements that no box has") {
  const TensorView view{{4, 3}, {{{{0, 0}, {4, 3}}, 0, 0, {3, 1}}}};
  const TensorView padded = test::value_of(pad(view, 0, 6));
  CHECK(padded.sizes == Dims{6, 3});
  CHECK(padded.boxes.size() == 1);
  CHECK(padded.boxes[0].box.sizes == Dims{4, 3});
  CHECK(test::value_of(pad(view, 1, 3)).sizes == view.sizes);
  CHECK(test::value_of(narrow(padded, 0, 5, 1)).boxes.empty());
  EXPECT_FAILURE(kInvalidArgument, "dim 1 of shape [4, 3] is longer than 2 already", pad(view, 1, 2));
  EXPECT_CODE(kInvalidArgument, pad(view, 2, 5));
  EXPECT_CODE(kInvalidArgument, pad(view, 0, INT64_MAX));
}

TEST_CASE("tensor_view: what torch refuses is refused") {
  const TensorView view{{4, 3}, {{{{0, 0}, {4, 3}}, 0, 0, {3, 1}}}};
  EXPECT_CODE(kInvalidArgument, narrow(view, 2, 0, 1));
  EXPECT_CODE(kInvalidArgument, narrow(view, 0, 3, 2));
  EXPECT_CODE(kInvalidArgument, narrow(view, 0, -1, 2));
  EXPECT_CODE(kInvalidArgument, narrow(view, 0, INT64_MAX, 2));
  EXPECT_CODE(kInvalidArgument, permute(view, {0}));
  EXPECT_CODE(kInvalidArgument, permute(view, {0, 0}));
  EXPECT_CODE(kInvalidArgument, permute(view, {0, 2}));
  EXPECT_FAILURE(kInvalidArgument, "[4, 3] cannot become [5, 2]", reshape(view, {5, 2}));
  EXPECT_CODE(kInvalidArgument, reshape(view, {-4, -3}));
  EXPECT_CODE(kInvalidArgument, stack({}, 0));
  EXPECT_CODE(kInvalidArgument, concatenate({view, {{4, 2}, {}}}, 0));
  EXPECT_CODE(kInvalidArgument, concatenate({view, {{4}, {}}}, 0));
  EXPECT_CODE(kInvalidArgument, stack({view, {{4, 2}, {}}}, 0));
  EXPECT_CODE(kInvalidArgument, stack({view, view}, 3));
  EXPECT_CODE(kInvalidArgument, concatenate({{{INT64_MAX}, {}}, {{1}, {}}}, 0));
}

TEST_CASE("tensor_view: tensors without elements go through everything") {
  const TensorView empty{{0, 3}, {{{{0, 0}, {0, 3}}, 0, 0, {3, 1}}}};
  CHECK(test::value_of(reshape(empty, {3, 0, 7})).sizes == Dims{3, 0, 7});
  CHECK(test::value_of(permute(empty, {1, 0})).sizes == Dims{3, 0});
  CHECK(test::value_of(narrow(empty, 1, 1, 2)).sizes == Dims{0, 2});
  CHECK(test::value_of(stack({empty, empty}, 1)).sizes == Dims{0, 2, 3});
}

}  // namespace
}  // namespace bytecheckpoint::planner
