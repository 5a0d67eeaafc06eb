// SPDX-License-Identifier: Apache-2.0
#include "csrc/format/torch/record_layouts.h"

#include "tests/cpp/expect.h"
#include "tests/cpp/random_box.h"

namespace bytecheckpoint::format {
namespace {

using tensor::Dims;
using tensor::DType;

void check_found(RecordLayouts* layouts, DType dtype, const Dims& sizes, int64_t offset) {
  const ZipRecord made = test::value_of(ZipRecord::layout(dtype, sizes, offset));
  const ZipRecord& found = *test::value_of(layouts->find(dtype, sizes, offset));
  REQUIRE(found.head() == made.head());
  REQUIRE(found.tail(0x12345678) == made.tail(0x12345678));
  REQUIRE(found.record_offset() == made.record_offset());
  REQUIRE(found.data_offset() == made.data_offset());
  REQUIRE(found.data_bytes() == made.data_bytes());
  REQUIRE(found.record_bytes() == made.record_bytes());
}

TEST_CASE("record_layouts: a layout that is kept is the one that would be made") {
  test::Random random(5);
  RecordLayouts layouts;
  // Few shapes, so that most are kept; those of a MiB and more depend on where the record begins.
  const std::vector<Dims> shapes = {
      {}, {0}, {3}, {16, 16}, {1 << 20}, {1 << 10, 1 << 10}, {300, 4096}, {int64_t{1} << 33}};
  for (int round = 0; round < 3000; ++round) {
    const auto dtype = static_cast<DType>(test::draw(&random, 1, 4));
    const Dims& sizes = shapes[static_cast<size_t>(test::draw(&random, 0, static_cast<int64_t>(shapes.size()) - 1))];
    check_found(&layouts, dtype, sizes, kRecordAlignment * test::draw(&random, 0, 200));
  }
  for (int round = 0; round < 3000; ++round) {
    const auto dtype = test::draw_plain_dtype(&random);
    check_found(&layouts, dtype, test::draw_sizes(&random, 5, 9), kRecordAlignment * test::draw(&random, 0, 1 << 20));
  }
}

TEST_CASE("record_layouts: an offset that no record of ours has, as a damaged manifest may name it") {
  RecordLayouts layouts;
  for (const int64_t offset : {0, 1, 64, 65, 63, 4096, 4097, 1}) {
    check_found(&layouts, DType::kFloat32, {3}, offset);
    check_found(&layouts, DType::kFloat32, {1 << 20}, offset);
  }
}

TEST_CASE("record_layouts: what cannot be stored is refused each time, and nothing else is forgotten") {
  RecordLayouts layouts;
  for (int round = 0; round < 2; ++round) {
    EXPECT_FAILURE(kInvalidArgument, "cannot be stored", layouts.find(DType::kNone, {3}, 0).status());
    EXPECT_FAILURE(kInvalidArgument, "cannot be stored", layouts.find(DType::kFloat32, {int64_t{1} << 62}, 0).status());
    check_found(&layouts, DType::kFloat32, {3}, 64);
  }
}

}  // namespace
}  // namespace bytecheckpoint::format
