// SPDX-License-Identifier: Apache-2.0
#include "csrc/engine/open/manifest_reader.h"

#include <string>

#include "csrc/format/manifest/metadata_file.h"
#include "tests/cpp/expect.h"
#include "tests/cpp/sample_manifest.h"
#include "tests/cpp/temp_dir.h"

namespace bytecheckpoint::engine {
namespace {

TEST_CASE("manifest_reader: reads what it is asked for from the mark") {
  const test::TempDir dir;
  test::write_all(dir / "__3.metadata", format::encode_metadata_file(test::sample_manifest()));
  ManifestReader reader = test::value_of(ManifestReader::open(dir.path(), 3));
  CHECK(reader.view().save_id() == test::sample_manifest().save_id);
  const auto weight = test::value_of(reader.find_item("layer.weight"));
  REQUIRE(weight.has_value());
  const auto chunks = test::value_of(reader.read_overlapping(*weight, {{1, 0}, {1, 5}}));
  REQUIRE(chunks.size() == 1);
  CHECK(test::value_of(reader.read_file(chunks[0].record.file)).name == test::sample_manifest().files[0].name);
  EXPECT_FAILURE(kInvalidArgument, "'layer.weight'", reader.read_overlapping(*weight, {{9, 0}, {1, 5}}));
  CHECK_FALSE(test::value_of(reader.find_item("layer")).has_value());
}

TEST_CASE("manifest_reader: head and parts say what the whole says") {
  const test::TempDir dir;
  const format::Manifest whole = test::sample_manifest();
  test::write_all(dir / ".metadata", format::encode_metadata_file(whole));
  ManifestReader reader = test::value_of(ManifestReader::open(dir.path()));
  format::Manifest read = test::value_of(reader.read_head());
  CHECK(read.items.empty());
  read.planner_data = whole.planner_data;
  for (const format::Item& item : whole.items) {
    const auto found = test::value_of(reader.find_item(item.fqn));
    REQUIRE(found.has_value());
    const tensor::Box all = tensor::whole(item.tensor.sizes);
    read.items.push_back(test::value_of(reader.read_part(*found, {all, all})));    // returns each chunk once
    if (read.items.back().chunks.empty()) read.items.back().chunks = item.chunks;  // no box overlaps an empty chunk
    if (item.is_tensor) CHECK(test::value_of(reader.read_part(*found, {})).chunks.empty());
  }
  CHECK(format::encode_metadata_file(read) == format::encode_metadata_file(whole));
}

TEST_CASE("manifest_reader: what cannot be read is told by name") {
  const test::TempDir dir;
  EXPECT_FAILURE(kNotFound, ".metadata", ManifestReader::open(dir.path()));
  const std::string path = dir / ".metadata";
  test::write_all(path, "\x80\x04N.");
  EXPECT_FAILURE(kUnsupported, path, ManifestReader::open(dir.path()));
  std::string file = format::encode_metadata_file(test::sample_manifest());
  file[file.size() - 140] ^= 1;  // a byte of the manifest or its table
  test::write_all(path, file);
  const auto damaged = ManifestReader::open(dir.path());
  EXPECT_FAILURE(kCorrupt, path, damaged);
  CHECK(damaged.status().path() == path);
}

}  // namespace
}  // namespace bytecheckpoint::engine
