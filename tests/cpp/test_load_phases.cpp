// SPDX-License-Identifier: Apache-2.0
#include "csrc/engine/load/load_phases.h"

#include <vector>

#include "tests/cpp/expect.h"

namespace bytecheckpoint::engine {
namespace {

using tensor::DType;

format::Chunk chunk_of(const tensor::Dims& sizes) {
  format::Chunk chunk;
  chunk.box = {tensor::Dims(sizes.size()), sizes};
  chunk.record.stored_dtype = DType::kFloat32;
  chunk.record.data_offset = 4096;
  return chunk;
}

TEST_CASE("load phases: what is not quantized is all read in the first") {
  std::vector<float> values(6);
  auto* const memory = reinterpret_cast<uint8_t*>(values.data());
  const format::Chunk chunk = chunk_of({2, 3});
  format::Record record;
  record.offset = 100;
  LoadPhases phases;
  CHECK(phases.is_empty());
  phases.add_plain(chunk, place_of(chunk), {{1, 1}, {1, 2}}, {memory, DType::kFloat32, {1, 2}, {8, 4}});
  phases.add_bytes(record, 3, 7, memory);
  REQUIRE(phases.first().wanted.size() == 2);
  REQUIRE(phases.first().destinations.size() == 2);
  CHECK(phases.first().wanted[0].offset == 4096 + 4 * 4);
  CHECK(phases.first().destinations[0].runs.end() == 8);
  CHECK((phases.first().destinations[0].memory == memory));
  CHECK(phases.first().wanted[1].offset == 103);
  CHECK(phases.first().destinations[1].runs.end() == 4);
  CHECK_FALSE(phases.begin_next());
  CHECK(phases.is_empty());
}

TEST_CASE("load phases: a device gets a box that lies together or has few pieces, and no other") {
  uint8_t byte = 0;  // stands for memory of a device, which nothing here looks at
  const format::Chunk chunk = chunk_of({5000, 8});
  const TensorPlace place = place_of(chunk);
  const auto add = [&](LoadPhases* phases, const tensor::Box& box) {
    const tensor::StridedView memory{&byte, DType::kFloat32, box.sizes, {4 * box.sizes[1], 4}};
    return phases->add_on_device(chunk, place, box, memory, /*device=*/0);
  };
  LoadPhases phases;
  CHECK_FALSE(add(&phases, {{0, 0}, {5000, 4}}));  // 5000 pieces of 16 bytes
  CHECK(phases.is_empty());
  CHECK(add(&phases, {{0, 0}, {4000, 4}}));
  CHECK(add(&phases, {{0, 0}, {5000, 8}}));
  REQUIRE(phases.first().destinations.size() == 2);
  CHECK((phases.first().destinations[1].on_device->view.data == &byte));
  CHECK((phases.first().destinations[1].memory == nullptr));
}

}  // namespace
}  // namespace bytecheckpoint::engine
