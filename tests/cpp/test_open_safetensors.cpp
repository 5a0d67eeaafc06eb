// SPDX-License-Identifier: Apache-2.0
#include "csrc/engine/open/open_any_checkpoint.h"
#include "csrc/engine/open/open_safetensors.h"

#include <filesystem>
#include <string>
#include <vector>

#include "csrc/base/bytes.h"
#include "tests/cpp/expect.h"
#include "tests/cpp/temp_dir.h"

namespace bytecheckpoint::engine {
namespace {

namespace fs = std::filesystem;
using test::TempDir;

/// A file of tensors of one byte each, by name.
std::string file_of(const std::vector<std::string>& names) {
  std::string json = "{", data;
  for (const std::string& name : names) {
    const size_t at = data.size();
    json += (at == 0 ? "\"" : ",\"") + name + R"(":{"dtype":"U8","shape":[1],"data_offsets":[)" + std::to_string(at) +
            "," + std::to_string(at + 1) + "]}";
    data.push_back(static_cast<char>('0' + at));
  }
  json += "}";
  base::ByteWriter out;
  out.u64(json.size());
  out.raw(json + data);
  return out.take();
}

std::string index_of(const std::vector<std::pair<std::string, std::string>>& files) {
  std::string json = R"({"weight_map":{)";
  for (const auto& [name, file] : files) json += (json.back() == '{' ? "\"" : ",\"") + name + "\":\"" + file + "\"";
  return json + "}}";
}

std::vector<std::string> names_of(const format::Manifest& manifest) {
  std::vector<std::string> names;
  for (const format::Item& item : manifest.items) names.push_back(item.fqn);
  return names;
}

using Names = std::vector<std::string>;

TEST_CASE("open safetensors: one file, by its path and by its folder") {
  const TempDir dir;
  test::write_all(dir / "model.safetensors", file_of({"b", "a"}));
  for (const std::string& path : {dir.path(), dir / "model.safetensors"}) {
    const format::Manifest manifest = test::value_of(open_any_checkpoint(path));
    CHECK(names_of(manifest) == Names{"a", "b"});
    CHECK(manifest.data_directory(path) == dir.path());
    CHECK(manifest.files.at(0).name == "model.safetensors");
    CHECK(manifest.items[0].ordinal == 1);
    const format::Record& record = manifest.items[0].chunks[0].record;
    CHECK(test::read_all(dir / "model.safetensors").at(static_cast<size_t>(record.data_offset)) == '1');
  }
}

TEST_CASE("open safetensors: an index decides which files belong to the model") {
  const TempDir dir;
  test::write_all(dir / "m-1.safetensors", file_of({"a", "tied"}));
  test::write_all(dir / "m-2.safetensors", file_of({"b", "tied"}));
  test::write_all(dir / "other.safetensors", file_of({"a"}));
  const std::string index = dir / "model.safetensors.index.json";
  test::write_all(index, index_of({{"a", "m-1.safetensors"}, {"b", "m-2.safetensors"}, {"tied", "m-2.safetensors"}}));
  for (const std::string& path : {dir.path(), index}) {
    const format::Manifest manifest = test::value_of(open_safetensors(path));
    CHECK(names_of(manifest) == Names{"a", "b", "tied"});
    CHECK(manifest.files.size() == 2);
    CHECK(manifest.items[2].chunks[0].record.file == 1);
  }
  test::write_all(index, index_of({{"a", "m-1.safetensors"}, {"b", "m-1.safetensors"}}));
  EXPECT_FAILURE(kCorrupt, "'b' is in this file, but it is not", open_safetensors(dir.path()));
  test::write_all(index, index_of({{"a", "m-1.safetensors"}, {"b", "m-3.safetensors"}}));
  EXPECT_FAILURE(kCorrupt, "m-3.safetensors", open_safetensors(dir.path()));
  test::write_all(index, "{");
  EXPECT_FAILURE(kCorrupt, index, open_safetensors(dir.path()));
  test::write_all(dir / "second.safetensors.index.json", index_of({}));
  EXPECT_FAILURE(kUnsupported, "2 models", open_safetensors(dir.path()));
}

TEST_CASE("open safetensors: without an index, numbered files must be complete and names must be in one file") {
  const TempDir dir;
  test::write_all(dir / "model-00001-of-00003.safetensors", file_of({"a"}));
  test::write_all(dir / "model-00003-of-00003.safetensors", file_of({"c"}));
  EXPECT_FAILURE(kCorrupt, "model-00002-of-00003.safetensors", open_safetensors(dir.path()));
  test::write_all(dir / "model-00002-of-00003.safetensors", file_of({"b"}));
  CHECK(names_of(test::value_of(open_safetensors(dir.path()))) == Names{"a", "b", "c"});
  test::write_all(dir / "consolidated.safetensors", file_of({"a"}));
  EXPECT_FAILURE(kCorrupt, "have 'a'", open_safetensors(dir.path()));
}

TEST_CASE("open safetensors: the links of Hugging Face's cache are followed, and no others") {
  const TempDir dir;
  fs::create_directories(dir / "blobs");
  fs::create_directories(dir / "snapshots/0123");
  test::write_all(dir / "blobs/aaa", file_of({"a"}));
  const std::string link = dir / "snapshots/0123/model.safetensors";
  fs::create_symlink("../../blobs/aaa", link);
  for (const std::string& path : {dir / "snapshots/0123", link}) {
    const format::Manifest manifest = test::value_of(open_safetensors(path));
    CHECK(manifest.files.at(0).name == "aaa");
    CHECK(fs::equivalent(manifest.data_directory(path), dir / "blobs"));
  }
  fs::remove(link);
  fs::create_symlink("../../blobs/../secret", link);
  test::write_all(dir / "secret", file_of({"a"}));
  CHECK(!open_safetensors(dir / "snapshots/0123").is_ok());
  fs::remove(link);
  fs::create_symlink(dir / "blobs/aaa", link);
  EXPECT_FAILURE(kUnsupported, "symbolic link", open_safetensors(dir / "snapshots/0123"));
}

TEST_CASE("open safetensors: damage names the file, and nothing there is no checkpoint") {
  const TempDir dir;
  EXPECT_CODE(kNotFound, open_safetensors(dir.path()));
  EXPECT_CODE(kNotFound, open_any_checkpoint(dir.path()));
  EXPECT_CODE(kNotFound, open_any_checkpoint(dir / "absent"));
  EXPECT_CODE(kNotFound, open_any_checkpoint(dir / "absent.safetensors"));
  const std::string path = dir / "model.safetensors", whole = file_of({"a", "b"});
  for (size_t size = 0; size < whole.size(); ++size) {
    test::write_all(path, whole.substr(0, size));
    EXPECT_FAILURE(kCorrupt, path, open_safetensors(dir.path()));
  }
  fs::remove(path);
  fs::create_directory(path);
  EXPECT_CODE(kNotFound, open_safetensors(path));
}

}  // namespace
}  // namespace bytecheckpoint::engine
