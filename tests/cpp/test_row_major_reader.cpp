// SPDX-License-Identifier: Apache-2.0
#include "csrc/engine/load/row_major_reader.h"

#include <string>
#include <vector>

#include "csrc/engine/open/open_checkpoint.h"
#include "tests/cpp/aligned_bytes.h"
#include "tests/cpp/saved_checkpoint.h"
#include "tests/cpp/temp_dir.h"

namespace bytecheckpoint::engine {
namespace {

using tensor::Box;
using tensor::Dims;
using tensor::DType;
using test::SaveItem;
using test::TempDir;

const auto kNever = [] { return false; };
constexpr int64_t kRows = 700, kColumns = 900;

LoadOptions reading_from(const TempDir& dir) {
  LoadOptions options;
  options.directory = dir.path();
  options.ring_bytes = 16 << 20;
  return options;
}

/// A chunk of the tensor `fqn` of [kRows, kColumns] int16, whose row-major elements are `memory`.
SaveItem chunk_of(const std::string& fqn, const Box& box, std::string* memory) {
  auto* at = reinterpret_cast<uint8_t*>(memory->data()) + 2 * (box.offsets[0] * kColumns + box.offsets[1]);
  return {fqn, {kRows, kColumns}, box, {at, DType::kInt16, box.sizes, {2 * kColumns, 2}}, {}};
}

/// Saves "w" in three chunks by two ranks, and an object.
std::shared_ptr<const format::Manifest> save_chunks(const TempDir& dir, std::string* memory) {
  const Box left{{0, 0}, {kRows, 301}}, top{{0, 301}, {99, 599}}, bottom{{99, 301}, {601, 599}};
  test::PendingSave save =
      test::begin_save(test::commit_options(dir.path(), 1),
                       {{chunk_of("w", bottom, memory), chunk_of("w", left, memory), test::bytes_item("an object")},
                        {chunk_of("w", top, memory)}});
  EXPECT_OK(save.finish());
  return std::make_shared<format::Manifest>(std::move(save.manifest));
}

TEST_CASE("row-major reader: any range, across chunks of two files, and objects") {
  const TempDir dir;
  std::string memory = test::patterned(2 * kRows * kColumns);
  RowMajorReader reader(reading_from(dir), save_chunks(dir, &memory), nullptr);
  EXPECT_OK(reader.locate({"w"}));
  REQUIRE(reader.num_tensors() == 1);
  CHECK(reader.dtype(0) == DType::kInt16);
  const int64_t numel = reader.numel(0);
  REQUIRE(numel == kRows * kColumns);
  const std::vector<std::pair<int64_t, int64_t>> ranges = {
      {0, numel}, {0, 1}, {numel - 1, numel}, {300, 302}, {299, 99 * kColumns + 5}, {5, 5}, {1234, 456'789}};
  for (const auto& [first, last] : ranges) {
    std::string got(static_cast<size_t>(2 * (last - first)) + 1, 'x');
    EXPECT_OK(reader.want(0, first, last, reinterpret_cast<uint8_t*>(got.data())));
    EXPECT_OK(reader.run(kNever));
    CHECK(got == memory.substr(static_cast<size_t>(2 * first), static_cast<size_t>(2 * (last - first))) + "x");
  }
  const format::Record& record = *test::value_of(reader.object("content"));
  std::string object(static_cast<size_t>(record.bytes), '\0');
  reader.want_record(record, 0, record.bytes, reinterpret_cast<uint8_t*>(object.data()));
  EXPECT_OK(reader.run(kNever));
  CHECK(object == "an object");
  // What was forgotten is not written to.
  std::string untouched(2, 'x');
  EXPECT_OK(reader.want(0, 0, 1, reinterpret_cast<uint8_t*>(untouched.data())));
  reader.forget();
  CHECK(test::value_of(reader.run(kNever)).num_boxes == 0);
  CHECK(untouched == "xx");
}

TEST_CASE("row-major reader: refuses what is not there, what has gaps, and damage") {
  const TempDir dir;
  std::string memory = test::patterned(2 * kRows * kColumns);
  const auto manifest = save_chunks(dir, &memory);
  RowMajorReader reader(reading_from(dir), manifest, nullptr);
  EXPECT_FAILURE(kInvalidArgument, "'x': the checkpoint has no such tensor", reader.locate({"x"}));
  EXPECT_FAILURE(kInvalidArgument, "'content': the checkpoint has no such tensor", reader.locate({"content"}));
  EXPECT_FAILURE(kInvalidArgument, "'w': the checkpoint has no such object", reader.object("w"));
  auto with_gap = std::make_shared<format::Manifest>(*manifest);
  for (format::Item& item : with_gap->items) {
    if (item.is_tensor) item.chunks.pop_back();
  }
  EXPECT_FAILURE(kInvalidArgument, "'w': some of its elements are in no chunk",
                 RowMajorReader(reading_from(dir), with_gap, nullptr).locate({"w"}));
  RowMajorReader other(reading_from(dir), manifest, nullptr);
  EXPECT_OK(other.locate({"w"}));
  EXPECT_CODE(kInvalidArgument, other.want(0, kRows * kColumns, kRows * kColumns + 1, nullptr));
  for (const format::FileEntry& file : manifest->files) {
    std::string bytes = test::read_all(dir / file.name);
    bytes[bytes.size() / 2] ^= 1;
    test::write_all(dir / file.name, bytes);
  }
  std::string all(static_cast<size_t>(2 * kRows * kColumns), '\0');
  EXPECT_OK(other.want(0, 0, kRows * kColumns, reinterpret_cast<uint8_t*>(all.data())));
  EXPECT_CODE(kCorrupt, other.run(kNever));
}

}  // namespace
}  // namespace bytecheckpoint::engine
