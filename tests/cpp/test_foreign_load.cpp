// SPDX-License-Identifier: Apache-2.0
#include <unistd.h>

#include <numeric>
#include <string>
#include <utility>
#include <vector>

#include "csrc/base/crc32.h"
#include "csrc/engine/load/load_job.h"
#include "csrc/format/torch/zip_record.h"
#include "tests/cpp/expect.h"
#include "tests/cpp/temp_dir.h"

namespace bytecheckpoint::engine {
namespace {

using tensor::Box;
using tensor::Dims;
using tensor::DType;
using test::TempDir;

constexpr int64_t kRows = 2100, kColumns = 1200;  // 10 MB of float: more than a slot

/// Writes a file that is not ours, with one archive that begins at `offset`. Returns the manifest that its pickle
/// describes.
format::Manifest write_foreign(const TempDir& dir, int64_t offset, const std::vector<float>& values) {
  const auto* bytes = reinterpret_cast<const char*>(values.data());
  const auto zip = test::value_of(format::ZipRecord::layout(DType::kFloat32, {kRows, kColumns}, 0));
  const std::string archive =
      zip.head() + std::string(bytes, 4 * values.size()) + zip.tail(base::crc32(0, bytes, 4 * values.size()));
  test::write_all(dir / "data.distcp", std::string(static_cast<size_t>(offset), 'x') + archive + "behind");

  format::Manifest manifest;
  manifest.foreign.emplace();
  manifest.files.emplace_back().name = "data.distcp";
  format::Item& item = manifest.items.emplace_back();
  item.fqn = "t";
  item.is_tensor = true;
  item.tensor.dtype = DType::kFloat32;
  item.tensor.sizes = {kRows, kColumns};
  format::Record record;
  record.kind = format::RecordKind::kForeign;
  record.offset = offset;
  record.bytes = static_cast<int64_t>(archive.size());
  item.chunks.push_back({{{0, 0}, {kRows, kColumns}}, record});
  return manifest;
}

std::vector<float> ascending() {
  std::vector<float> values(kRows * kColumns);
  std::iota(values.begin(), values.end(), 0.0f);
  return values;
}

LoadOptions options_for(const TempDir& dir, bool verify = true) {
  LoadOptions options;
  options.directory = dir.path();
  options.verify = verify;
  return options;
}

TensorPlace locate(const TempDir& dir, const format::Manifest& manifest) {
  const auto places = test::value_of(locate_tensors(dir.path(), manifest, {{&manifest.items[0].chunks[0], nullptr}}));
  REQUIRE(places[0].has_value());
  return *places[0];
}

TEST_CASE("foreign load: an archive may begin anywhere, so that segments end inside its elements") {
  const std::vector<float> values = ascending();
  for (const int64_t offset : {0, 64, 1, 2, 3, 4095}) {
    CAPTURE(offset);
    const TempDir dir;
    const format::Manifest manifest = write_foreign(dir, offset, values);
    const TensorPlace place = locate(dir, manifest);
    CHECK(place.dtype == DType::kFloat32);
    CHECK(place.strides == tensor::Dims{kColumns, 1});
    CHECK(place.fills_stretch);
    LoadJob job(options_for(dir), manifest);
    const format::Chunk& chunk = manifest.items[0].chunks[0];
    // Into the whole tensor, into a box, and into a transposed box.
    std::vector<float> whole(values.size()), part(5 * 7), turned(5 * 7);
    const Box box{{kRows - 6, 3}, {5, 7}};
    auto* memory = reinterpret_cast<uint8_t*>(whole.data());
    EXPECT_OK(job.destinations().add_tensor("t", chunk, place, chunk.box,
                                            {memory, DType::kFloat32, {kRows, kColumns}, {4 * kColumns, 4}}));
    memory = reinterpret_cast<uint8_t*>(part.data());
    EXPECT_OK(job.destinations().add_tensor("t", chunk, place, box, {memory, DType::kFloat32, {5, 7}, {28, 4}}));
    memory = reinterpret_cast<uint8_t*>(turned.data());
    EXPECT_OK(job.destinations().add_tensor("t", chunk, place, box, {memory, DType::kFloat32, {5, 7}, {4, 20}}));
    EXPECT_OK(job.run([] { return false; }));
    CHECK(whole == values);
    for (int64_t r = 0; r < 5; ++r) {
      for (int64_t c = 0; c < 7; ++c) {
        const float wanted = values[static_cast<size_t>((kRows - 6 + r) * kColumns + 3 + c)];
        REQUIRE(part[static_cast<size_t>(7 * r + c)] == wanted);
        REQUIRE(turned[static_cast<size_t>(5 * c + r)] == wanted);
      }
    }
  }
}

TEST_CASE("foreign load: the checksum of the archive is compared when all of it is wanted") {
  const TempDir dir;
  const std::vector<float> values = ascending();
  const format::Manifest manifest = write_foreign(dir, 3, values);
  const TensorPlace place = locate(dir, manifest);
  test::flip_bit(dir / "data.distcp", place.data_offset + 9'500'000);
  const format::Chunk& chunk = manifest.items[0].chunks[0];
  for (const bool verify : {true, false}) {
    std::vector<float> whole(values.size());
    LoadJob job(options_for(dir, verify), manifest);
    auto* memory = reinterpret_cast<uint8_t*>(whole.data());
    EXPECT_OK(job.destinations().add_tensor("t", chunk, place, chunk.box,
                                            {memory, DType::kFloat32, {kRows, kColumns}, {4 * kColumns, 4}}));
    if (verify) {
      EXPECT_FAILURE(kCorrupt, dir / "data.distcp", job.run([] { return false; }));
    } else {
      EXPECT_OK(job.run([] { return false; }));
    }
  }
}

TEST_CASE("foreign load: a chunk without a place, a missing file and a cut one are told") {
  const TempDir dir;
  format::Manifest manifest = write_foreign(dir, 0, ascending());
  format::Chunk& chunk = manifest.items[0].chunks[0];
  const std::vector<const format::Chunk*> wanted = {&chunk};
  const std::string content = test::read_all(dir / "data.distcp");
  test::write_all(dir / "data.distcp", content.substr(0, content.size() / 2));
  EXPECT_FAILURE(kCorrupt, dir / "data.distcp", locate_tensors(dir.path(), manifest, {{&chunk, nullptr}}));
  EXPECT_FAILURE(kCorrupt, dir / "data.distcp", check_extents(dir.path(), manifest, wanted));
  REQUIRE(::unlink((dir / "data.distcp").c_str()) == 0);
  EXPECT_FAILURE(kStorage, dir / "data.distcp", locate_tensors(dir.path(), manifest, {{&chunk, nullptr}}));
  chunk.record = {};
  chunk.record.kind = format::RecordKind::kAbsent;
  EXPECT_CODE(kCorrupt, check_extents(dir.path(), manifest, wanted));
}

TEST_CASE("foreign load: lengths and offsets that no file has are refused before memory is taken for them") {
  const TempDir dir;
  format::Manifest manifest = write_foreign(dir, 0, ascending());
  format::Record& record = manifest.items[0].chunks[0].record;
  const std::vector<const format::Chunk*> wanted = {&manifest.items[0].chunks[0]};
  EXPECT_OK(check_extents(dir.path(), manifest, wanted));
  for (const auto& [offset, bytes] :
       {std::pair<int64_t, int64_t>{0, int64_t{1} << 50}, {int64_t{1} << 62, 1}, {100'000'000, 0}}) {
    record.offset = offset;
    record.bytes = bytes;
    EXPECT_FAILURE(kCorrupt, "the file has", check_extents(dir.path(), manifest, wanted));
  }
}

}  // namespace
}  // namespace bytecheckpoint::engine
