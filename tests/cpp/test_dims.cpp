// SPDX-License-Identifier: Apache-2.0
#include "csrc/tensor/dims.h"

#include <doctest/doctest.h>

#include <random>
#include <vector>

namespace bytecheckpoint::tensor {
namespace {

std::vector<int64_t> vector_of(const Dims& dims) {
  return {dims.begin(), dims.end()};
}

TEST_CASE("dims: made from what a vector is made from") {
  CHECK(Dims().empty());
  CHECK(vector_of(Dims(3)) == std::vector<int64_t>(3));
  CHECK(vector_of(Dims(6, 7)) == std::vector<int64_t>(6, 7));
  CHECK(vector_of(Dims{4, 5}) == std::vector<int64_t>{4, 5});
  const std::vector<int32_t> narrow = {1, 2, 3, 4, 5};
  CHECK(vector_of(Dims(narrow.begin(), narrow.end())) == std::vector<int64_t>{1, 2, 3, 4, 5});
}

TEST_CASE("dims: four need no memory of their own, a fifth does") {
  Dims dims = {1, 2, 3, 4};
  const auto* object = reinterpret_cast<const char*>(&dims);
  const auto* numbers = reinterpret_cast<const char*>(dims.data());
  CHECK(numbers >= object);
  CHECK(numbers < object + sizeof dims);
  dims.push_back(5);
  CHECK(vector_of(dims) == std::vector<int64_t>{1, 2, 3, 4, 5});
  CHECK(dims.capacity() > Dims::kInlineDims);
}

TEST_CASE("dims: copies are apart, moved ones are empty and usable") {
  for (const size_t count : {0, 1, 4, 5, 300}) {
    Dims dims(count, 9);
    Dims copy = dims;
    if (count != 0) copy[count - 1] = 1;
    CHECK(vector_of(dims) == std::vector<int64_t>(count, 9));
    const Dims moved = std::move(dims);
    CHECK(vector_of(moved) == std::vector<int64_t>(count, 9));
    CHECK(dims.empty());  // NOLINT: the moved-from state is what is tested
    dims.push_back(3);
    CHECK(vector_of(dims) == std::vector<int64_t>{3});
    Dims& same = copy;
    copy = same;
    CHECK(copy.size() == count);
    copy = std::move(same);
    CHECK(copy.size() == count);
  }
}

TEST_CASE("dims: compared as sequences") {
  CHECK(Dims{1, 2} == Dims{1, 2});
  CHECK(Dims{1, 2} != Dims{1, 2, 3});
  CHECK(Dims{1, 2} < Dims{1, 2, 3});
  CHECK(Dims{1, 2, 3} < Dims{1, 3});
  CHECK_FALSE(Dims{1, 2} < Dims{1, 2});
}

TEST_CASE("dims: whatever is done to them, as a vector") {
  std::mt19937_64 random(3);
  std::vector<Dims> dims(8);
  std::vector<std::vector<int64_t>> wanted(dims.size());
  for (int round = 0; round < 20000; ++round) {
    const size_t a = random() % dims.size(), b = random() % dims.size(), count = random() % 9;
    const auto value = static_cast<int64_t>(random());
    switch (random() % 8) {
      case 0:
        dims[a] = dims[b];
        wanted[a] = wanted[b];
        break;
      case 1:
        if (a == b) break;
        dims[a] = std::move(dims[b]);
        wanted[a] = std::move(wanted[b]);
        wanted[b].clear();
        break;
      case 2:
        dims[a].resize(count);
        wanted[a].resize(count);
        break;
      case 3:
        dims[a].assign(count, value);
        wanted[a].assign(count, value);
        break;
      case 4:
        dims[a].push_back(value);
        wanted[a].push_back(value);
        break;
      case 5:
        dims[a].reserve(count);
        break;
      case 6:
        std::swap(dims[a], dims[b]);
        std::swap(wanted[a], wanted[b]);
        break;
      default:
        dims[a].clear();
        wanted[a].clear();
    }
    REQUIRE(vector_of(dims[a]) == wanted[a]);
    REQUIRE(vector_of(dims[b]) == wanted[b]);
    REQUIRE((dims[a] == dims[b]) == (wanted[a] == wanted[b]));
    REQUIRE((dims[a] < dims[b]) == (wanted[a] < wanted[b]));
  }
}

}  // namespace
}  // namespace bytecheckpoint::tensor
