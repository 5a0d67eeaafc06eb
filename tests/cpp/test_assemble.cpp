// SPDX-License-Identifier: Apache-2.0
#include "csrc/engine/commit/assemble.h"

#include <algorithm>
#include <map>
#include <string>
#include <utility>
#include <vector>

#include "tests/cpp/expect.h"
#include "tests/cpp/random_box.h"

namespace bytecheckpoint::engine {
namespace {

using format::FileEntry;
using format::Item;
using format::Manifest;
using format::RecordKind;
using format::WriteResult;
using tensor::Box;
using tensor::DType;

Item planned_tensor(const std::string& fqn, tensor::Dims sizes, const std::vector<Box>& boxes) {
  Item item;
  item.fqn = fqn;
  item.is_tensor = true;
  item.tensor.dtype = DType::kFloat32;
  item.tensor.sizes = std::move(sizes);
  for (const Box& box : boxes) item.chunks.push_back({box, {}});
  return item;
}

Item planned_bytes(const std::string& fqn) {
  Item item;
  item.fqn = fqn;
  item.chunks.emplace_back();
  return item;
}

FileEntry file_of(uint32_t rank) {
  FileEntry file;
  file.id.rank = rank;
  file.name = format::data_file_name(file.id);
  return file;
}

format::WrittenRecord written(const std::string& fqn, const Box& box, int64_t offset, uint32_t file = 0) {
  const bool bytes = box.sizes.empty();
  return {fqn, box, {bytes ? RecordKind::kBytes : RecordKind::kTensor, DType::kFloat32, file, offset, 100, 0, 0}};
}

TEST_CASE("assemble: every chunk finds its record by name and box, in whatever order it was written") {
  Manifest plan;
  plan.items = {planned_tensor("w", {4}, {{{0}, {2}}, {{2}, {2}}}), planned_bytes("b"),
                planned_tensor("a", {3}, {{{0}, {3}}})};
  WriteResult rank0, rank1;
  rank0.files = {file_of(0)};
  rank0.records = {written("w", {{2}, {2}}, 11), written("b", {}, 12)};
  rank1.files = {file_of(1), file_of(2)};
  rank1.records = {written("a", {{0}, {3}}, 21, 1), written("w", {{0}, {2}}, 22, 0)};

  const Manifest manifest = test::value_of(assemble_manifest(plan, {rank0, rank1}));
  REQUIRE(manifest.items.size() == 3);
  CHECK(manifest.items[0].fqn == "a");
  CHECK(manifest.items[1].fqn == "b");
  CHECK(manifest.items[2].fqn == "w");
  CHECK(manifest.items[0].chunks[0].record.offset == 21);
  CHECK(manifest.items[0].chunks[0].record.file == 2);
  CHECK(manifest.items[1].chunks[0].record.offset == 12);
  CHECK(manifest.items[2].chunks[0].record.offset == 22);
  CHECK(manifest.items[2].chunks[0].record.file == 1);
  CHECK(manifest.items[2].chunks[1].record.offset == 11);
  CHECK(manifest.items[2].chunks[1].record.file == 0);
  REQUIRE(manifest.files.size() == 3);
  CHECK(manifest.files[2].name == file_of(2).name);
}

TEST_CASE("assemble: where two ranks wrote one chunk, the last one's record is taken") {
  Manifest plan;
  plan.items = {planned_bytes("b")};
  WriteResult rank0, rank1;
  rank0.files = {file_of(0)};
  rank0.records = {written("b", {}, 1)};
  rank1.files = {file_of(1)};
  rank1.records = {written("b", {}, 2)};
  const Manifest manifest = test::value_of(assemble_manifest(plan, {rank0, rank1}));
  CHECK(manifest.items[0].chunks[0].record.offset == 2);
  CHECK(manifest.items[0].chunks[0].record.file == 1);
}

TEST_CASE("assemble: a chunk that nobody wrote is named") {
  Manifest plan;
  plan.items = {planned_tensor("layer.w", {4}, {{{0}, {2}}, {{2}, {2}}})};
  WriteResult rank0;
  rank0.files = {file_of(0)};
  rank0.records = {written("layer.w", {{0}, {2}}, 1)};
  EXPECT_FAILURE(kInvalidArgument, "'layer.w' chunk at [2]: planned, but written by no rank",
                 assemble_manifest(plan, {rank0}));
  EXPECT_FAILURE(kInvalidArgument, "layer.w", assemble_manifest(plan, {}));
}

TEST_CASE(
    "assemble: a tensor whose chunks leave a gap or overlap is refused, though all that was planned was written") {
  Manifest plan;
  plan.items = {planned_tensor("model.0.weight", {256, 4}, {{{0, 0}, {128, 4}}})};
  WriteResult rank0;
  rank0.files = {file_of(0)};
  rank0.records = {written("model.0.weight", {{0, 0}, {128, 4}}, 1),
                   written("model.0.weight", {{100, 0}, {156, 4}}, 2)};
  EXPECT_FAILURE(kInvalidArgument, "'model.0.weight': rows 128 to 255 of 256 are in no chunk",
                 assemble_manifest(plan, {rank0}));
  EXPECT_OK(assemble_manifest(plan, {rank0}, Gaps::kIgnore));
  CHECK(test::value_of(assemble_manifest(plan, {rank0}, Gaps::kMark)).items[0].is_partial);
  plan.items[0].is_partial = true;  // the planner knows that it is partial
  EXPECT_OK(assemble_manifest(plan, {rank0}));
  plan.items = {planned_tensor("model.0.weight", {256, 4}, {{{0, 0}, {128, 4}}, {{100, 0}, {156, 4}}})};
  for (const Gaps gaps : {Gaps::kRefuse, Gaps::kMark, Gaps::kIgnore}) {
    EXPECT_FAILURE(kInvalidArgument, "overlap", assemble_manifest(plan, {rank0}, gaps));
  }
}

TEST_CASE("assemble: a chunk written with another shape or kind is named") {
  Manifest plan;
  plan.items = {planned_tensor("w", {4}, {{{0}, {4}}})};
  WriteResult other;
  other.files = {file_of(0)};
  other.records = {written("w", {{0}, {3}}, 1)};
  EXPECT_FAILURE(kInvalidArgument, "of [3]", assemble_manifest(plan, {other}));
  other.records = {written("w", {{0}, {4}}, 1)};
  other.records[0].record.kind = RecordKind::kBytes;
  EXPECT_FAILURE(kInvalidArgument, "written as bytes", assemble_manifest(plan, {other}));
  other.records[0].record.kind = RecordKind::kOpaque;
  EXPECT_OK(assemble_manifest(plan, {other}));
  plan.items = {planned_bytes("w")};
  other.records = {written("w", {}, 1)};
  other.records[0].record.kind = RecordKind::kTensor;
  EXPECT_FAILURE(kInvalidArgument, "planned as bytes", assemble_manifest(plan, {other}));
}

TEST_CASE("assemble: a plan that cannot be is refused") {
  WriteResult rank0;
  rank0.files = {file_of(0)};
  rank0.records = {written("w", {{2}, {3}}, 1)};
  Manifest plan;
  plan.items = {planned_tensor("w", {4}, {{{2}, {3}}})};
  EXPECT_FAILURE(kInvalidArgument, "outside its tensor of shape [4]", assemble_manifest(plan, {rank0}));
  plan.items = {planned_tensor("w", {4}, {{{0}, {4}}})};
  plan.items[0].tensor.dtype = DType::kNone;
  EXPECT_FAILURE(kInvalidArgument, "unknown dtype", assemble_manifest(plan, {rank0}));
}

TEST_CASE("assemble: names are sorted by the bytes of UTF-8") {
  Manifest plan;
  plan.items = {planned_bytes("\xC3\xA9"), planned_bytes("z"), planned_bytes("Z"), planned_bytes("a.b"),
                planned_bytes("a")};
  WriteResult rank0;
  rank0.files = {file_of(0)};
  for (const Item& item : plan.items) rank0.records.push_back(written(item.fqn, {}, 1));
  const Manifest manifest = test::value_of(assemble_manifest(plan, {rank0}));
  std::string names;
  for (const Item& item : manifest.items) names += item.fqn + " ";
  CHECK(names == "Z a a.b z \xC3\xA9 ");
}

TEST_CASE("assemble: a name that is planned twice is refused, before it replaces a checkpoint that can be read") {
  Manifest plan;
  plan.items = {planned_bytes("b"), planned_bytes("b")};
  WriteResult rank0;
  rank0.files = {file_of(0)};
  rank0.records = {written("b", {}, 4096)};
  const auto joined = assemble_manifest(plan, {rank0});
  EXPECT_CODE(kInvalidArgument, joined);
  CHECK(test::contains(joined.status().message(), "'b'"));
}

TEST_CASE("assemble: more dims than one byte counts are refused") {
  Manifest plan;
  plan.items = {planned_tensor("deep", tensor::Dims(256, 1), {})};
  EXPECT_CODE(kInvalidArgument, assemble_manifest(plan, {}));
  plan.items = {planned_tensor("deep", tensor::Dims(255, 1), {})};
  EXPECT_OK(assemble_manifest(plan, {}, Gaps::kIgnore));
}

TEST_CASE("assemble: any order of chunks and records, records twice, chunks that begin at one place") {
  test::Random random(5);
  for (int round = 0; round < 2000; ++round) {
    Manifest plan;
    for (const char* fqn : {"b", "a", "c"}) {
      std::vector<Box> boxes;
      const int64_t num_boxes = test::draw(&random, 0, 6);
      for (int64_t row = 0; row < num_boxes; ++row) {
        const int64_t rows = test::draw(&random, 0, 3) == 0 ? 0 : 1;  // empty shards may share an offset
        boxes.push_back({{row - (rows == 0 && row != 0 ? 1 : 0), 2}, {0, 3}});
      }
      if (test::draw(&random, 0, 1) == 0) std::shuffle(boxes.begin(), boxes.end(), random);
      plan.items.push_back(planned_tensor(fqn, {9, 5}, boxes));
    }
    std::vector<WriteResult> results(3);
    for (uint32_t rank = 0; rank < 3; ++rank) results[rank].files = {file_of(rank)};
    // By name and offsets: the record of the last rank that wrote it, and its last one.
    std::map<std::pair<std::string, int64_t>, std::pair<size_t, int64_t>> wanted;
    for (size_t rank = 0; rank < 3; ++rank) {
      for (const Item& item : plan.items) {
        for (const format::Chunk& chunk : item.chunks) {
          if (rank != 2 && test::draw(&random, 0, 1) == 0) continue;
          results[rank].records.push_back(written(item.fqn, chunk.box, test::draw(&random, 0, 1000000)));
        }
      }
      if (test::draw(&random, 0, 1) == 0) {
        std::shuffle(results[rank].records.begin(), results[rank].records.end(), random);
      }
      for (const format::WrittenRecord& record : results[rank].records) {
        wanted[{record.fqn, record.box.offsets[0]}] = {rank, record.record.offset};
      }
    }
    results[0].records.push_back(written("nobody planned this", {{0}, {1}}, 1));
    results[0].records.push_back(written("a", {{8, 2}, {0, 3}}, 1));
    const Manifest manifest = test::value_of(assemble_manifest(plan, results, Gaps::kIgnore));
    for (const Item& item : manifest.items) {
      for (const format::Chunk& chunk : item.chunks) {
        const auto& [rank, offset] = wanted.at({item.fqn, chunk.box.offsets[0]});
        REQUIRE(chunk.record.file == rank);
        REQUIRE(chunk.record.offset == offset);
      }
    }
  }
}

}  // namespace
}  // namespace bytecheckpoint::engine
