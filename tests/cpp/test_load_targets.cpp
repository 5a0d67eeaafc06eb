// SPDX-License-Identifier: Apache-2.0
#include "csrc/staging/load_targets.h"

#include <doctest/doctest.h>

#include <algorithm>
#include <cstdint>
#include <utility>
#include <vector>

namespace bytecheckpoint::staging {
namespace {

using tensor::Dims;
using Numbers = std::vector<size_t>;

/// Memory of `device` from `at` on, of int32 elements. Nobody reads it.
TensorMemory memory_at(intptr_t at, const Dims& sizes, const Dims& strides_bytes, int device = 0) {
  return {device, {reinterpret_cast<uint8_t*>(at), tensor::DType::kInt32, sizes, strides_bytes}};
}

TensorMemory flat(intptr_t at, int64_t numel, int device = 0) {
  return memory_at(at, {numel}, {4}, device);
}

struct Outcome {
  Numbers apart, left_out;
};

/// Adds tensors, whole, under their numbers.
Outcome outcome_of(const std::vector<TensorMemory>& tensors) {
  LoadTargets targets;
  for (size_t t = 0; t < tensors.size(); ++t) targets.add(t, tensors[t], t, tensors[t]);
  Outcome out;
  for (const LoadTargets::Part& part : targets.take_apart(&out.left_out)) {
    CHECK(part.memory.view.data == tensors[part.number].view.data);
    out.apart.push_back(part.number);
  }
  CHECK(targets.take_apart(&out.left_out).empty());  // nothing is left
  return out;
}

TEST_CASE("load_targets: tensors side by side are apart, in the order in which they came") {
  const Outcome out = outcome_of({flat(5000, 10), flat(1000, 10), flat(1040, 1), memory_at(1044, {3, 4}, {4, 12})});
  CHECK(out.apart == Numbers{0, 1, 2, 3});
  CHECK(out.left_out.empty());
}

TEST_CASE("load_targets: of tensors that share memory, the first one is filled, also one within a larger one") {
  // 1 holds 2 and 4, which do not touch each other; 0 and 3 are tied; 5 begins where 1 ends.
  const Outcome out = outcome_of(
      {flat(9000, 7), flat(1000, 100), flat(1004, 2), flat(9000, 7), flat(1200, 2), flat(1400, 2), flat(1396, 1)});
  CHECK(out.apart == Numbers{0, 1, 5});
  CHECK(out.left_out == Numbers{2, 3, 4, 6});
  CHECK(outcome_of({flat(1004, 2), flat(1200, 2), flat(1000, 100)}).left_out == Numbers{1, 2});
}

TEST_CASE("load_targets: nothing is filled before a tensor that is left out and comes before it in the same memory") {
  CHECK(outcome_of({memory_at(1000, {5, 4}, {0, 4}), flat(1000, 4), flat(1016, 1)}).apart == Numbers{2});
  LoadTargets targets;
  targets.leave_out(3, 0, flat(1000, 100));
  targets.add(4, flat(1000, 50), 1, flat(1000, 100));
  targets.leave_out(5, 1, flat(1000, 100));
  targets.add(6, flat(5000, 10), 2, flat(5000, 20));
  targets.leave_out(7, 2, flat(5000, 20));
  targets.add(8, flat(5040, 10), 2, flat(5000, 20));
  targets.add(9, flat(5000, 1), 3, flat(5000, 1));
  Numbers apart, left_out;
  for (const LoadTargets::Part& part : targets.take_apart(&left_out)) apart.push_back(part.number);
  std::sort(left_out.begin(), left_out.end());
  CHECK(apart == Numbers{6, 8});
  CHECK(left_out == Numbers{3, 4, 5, 7, 9});
}

TEST_CASE("load_targets: the same address on another device is other memory") {
  const Outcome out = outcome_of({flat(1000, 100, 0), flat(1000, 100, 1), flat(1200, 10, 1), flat(1000, 100, 2)});
  CHECK(out.apart == Numbers{0, 1, 3});
  CHECK(out.left_out == Numbers{2});
}

TEST_CASE("load_targets: elements that share memory among themselves") {
  const Outcome out = outcome_of({
      memory_at(1000, {5, 4}, {0, 4}),          // expanded
      memory_at(2000, {5, 4}, {4, 4}),          // windows
      memory_at(3000, {5, 4, 1}, {4, 20, 0}),   // turned; a dim of one element may have any stride
      memory_at(4000, {5, 0}, {0, 0}),          // no elements
      memory_at(5000, {2, 3, 2}, {48, 8, 24}),  // interleaved dims, none in another's place
      memory_at(6000, {2, 3, 2}, {16, 8, 24}),
  });
  CHECK(out.apart == Numbers{2, 3, 4});
  CHECK(out.left_out == Numbers{0, 1, 5});
}

TEST_CASE("load_targets: parts of a tensor may interleave, but not with another tensor") {
  LoadTargets targets;
  const auto columns = [](intptr_t at) { return memory_at(at, {10, 2}, {16, 4}); };
  targets.add(7, columns(1000), 0, columns(1000));
  targets.add(8, columns(1008), 0, columns(1008));
  targets.add(9, columns(2000), 1, columns(2000));
  targets.add(10, columns(2008), 2, columns(2008));
  targets.add(11, flat(0, 0), 0, flat(0, 0));  // without elements, so without memory
  targets.add(12, flat(0, 0), 3, flat(0, 0));
  Numbers apart, left_out{3};
  for (const LoadTargets::Part& part : targets.take_apart(&left_out)) apart.push_back(part.number);
  CHECK(apart == Numbers{7, 8, 9, 11, 12});
  CHECK(left_out == Numbers{3, 10});
}

}  // namespace
}  // namespace bytecheckpoint::staging
