// SPDX-License-Identifier: Apache-2.0
#include "csrc/engine/open/open_torch_file.h"

#include <cstring>
#include <filesystem>
#include <string>
#include <vector>

#include "csrc/engine/check/verify_job.h"
#include "csrc/engine/load/load_job.h"
#include "csrc/engine/open/open_any_checkpoint.h"
#include "tests/cpp/expect.h"
#include "tests/cpp/temp_dir.h"
#include "tests/cpp/torch_file_parts.h"

namespace bytecheckpoint::engine {
namespace {

namespace fs = std::filesystem;
using namespace test::pickled;  // NOLINT
using test::pickled_floats;
using test::TempDir;
using test::torch_file_of;
using Names = std::vector<std::string>;

/// The floats 0 to 11, as bytes.
std::string twelve() {
  std::string bytes;
  for (int i = 0; i < 12; ++i) bytes += little(static_cast<float>(i));
  return bytes;
}

std::string file_of(const std::string& name) {
  return torch_file_of(dict({{name, pickled_floats("0", 12, 0, {3, 4}, {4, 1})}, {"n." + name, number(1)}}),
                       {{"0", twelve()}});
}

Names names_of_all(const format::Manifest& manifest) {
  Names names;
  for (const format::Item& item : manifest.items) names.push_back(item.fqn);
  return names;
}

/// Loads a box of a tensor.
std::vector<float> load(const TempDir& dir, const format::Manifest& manifest, const char* fqn, const tensor::Box& box,
                        base::Status* outcome = nullptr) {
  const format::Chunk& chunk = manifest.find(fqn)->chunks[0];
  const auto places = test::value_of(locate_tensors(dir.path(), manifest, {{&chunk, nullptr}}));
  LoadOptions options;
  options.directory = dir.path();
  LoadJob job(options, manifest);
  int64_t numel = 0;
  REQUIRE(tensor::checked_numel(box.sizes, &numel));
  std::vector<float> values(static_cast<size_t>(numel));
  tensor::Dims strides = tensor::row_major_strides(box.sizes);
  for (int64_t& stride : strides) stride *= 4;
  EXPECT_OK(job.destinations().add_tensor(
      fqn, chunk, *places[0], box,
      {reinterpret_cast<uint8_t*>(values.data()), tensor::DType::kFloat32, box.sizes, strides}));
  const base::Status status = job.run([] { return false; }).status();
  if (outcome == nullptr) {
    EXPECT_OK(status);
  } else {
    *outcome = status;
  }
  return values;
}

TEST_CASE("open torch file: by any name, and only if it begins as one") {
  const TempDir dir;
  test::write_all(dir / "a.pt", file_of("w"));
  test::write_all(dir / "other", file_of("w"));
  for (const char* name : {"a.pt", "other"}) {
    const format::Manifest manifest = test::value_of(open_any_checkpoint(dir / name));
    CHECK(names_of_all(manifest) == Names{"n.w", "w"});
    CHECK(manifest.data_directory(dir / name) == dir.path());
    CHECK(manifest.files.at(0).name == name);
  }
  test::write_all(dir / "b.pt", "neither");
  EXPECT_FAILURE(kNotFound, "no checkpoint there", open_any_checkpoint(dir / "b.pt"));
  test::write_all(dir / "b.pt", "");
  EXPECT_FAILURE(kNotFound, "no checkpoint there", open_any_checkpoint(dir / "b.pt"));
  EXPECT_FAILURE(kNotFound, "no checkpoint there", open_any_checkpoint(dir / "c.pt"));
  test::write_all(dir / "b.pt", file_of("w").substr(0, 300));
  EXPECT_FAILURE(kCorrupt, dir / "b.pt", open_any_checkpoint(dir / "b.pt"));
  // A folder of files of any name is no model.
  EXPECT_FAILURE(kNotFound, "no checkpoint there", open_any_checkpoint(dir.path()));
}

TEST_CASE("open torch file: views of one storage, whole and in part") {
  const TempDir dir;
  test::write_all(dir / "a.pt", torch_file_of(dict({{"all", pickled_floats("0", 12, 0, {3, 4}, {4, 1})},
                                                    {"turned", pickled_floats("0", 12, 0, {4, 3}, {1, 4})},
                                                    {"part", pickled_floats("0", 12, 5, {2, 2}, {4, 2})},
                                                    {"last", pickled_floats("0", 12, 11, {1}, {7})}}),
                                              {{"0", twelve()}}));
  const format::Manifest manifest = test::value_of(open_torch_file(dir / "a.pt"));
  CHECK(load(dir, manifest, "all", {{0, 0}, {3, 4}}) == std::vector<float>{0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11});
  CHECK(load(dir, manifest, "all", {{1, 2}, {2, 2}}) == std::vector<float>{6, 7, 10, 11});
  CHECK(load(dir, manifest, "turned", {{0, 0}, {4, 3}}) == std::vector<float>{0, 4, 8, 1, 5, 9, 2, 6, 10, 3, 7, 11});
  CHECK(load(dir, manifest, "turned", {{2, 1}, {2, 2}}) == std::vector<float>{6, 10, 7, 11});
  CHECK(load(dir, manifest, "part", {{0, 0}, {2, 2}}) == std::vector<float>{5, 7, 9, 11});
  CHECK(load(dir, manifest, "part", {{1, 1}, {1, 1}}) == std::vector<float>{11});
  CHECK(load(dir, manifest, "last", {{0}, {1}}) == std::vector<float>{11});
}

TEST_CASE("open torch file: a changed element is found by verify, and by a load of the whole storage") {
  const TempDir dir;
  const std::string value =
      dict({{"turned", pickled_floats("0", 12, 0, {4, 3}, {1, 4})}, {"row", pickled_floats("0", 12, 0, {4}, {1})}});
  test::write_all(dir / "a.pt", torch_file_of(value, {{"0", twelve()}}));
  const auto verified = [&] {
    VerifyOptions options;
    options.directory = dir / "a.pt";
    return test::value_of(verify_checkpoint(options, [](int64_t, int64_t) { return true; }));
  };
  const VerifyReport whole = verified();
  CHECK(whole.problems.empty());
  const auto pickle_bytes = static_cast<int64_t>(test::pickled::whole(value).size());
  CHECK(whole.bytes_checked == pickle_bytes + 6 + 48);  // data.pkl, byteorder, data/0
  CHECK(whole.num_records == 3);
  format::Manifest manifest = test::value_of(open_torch_file(dir / "a.pt"));
  test::flip_bit(dir / "a.pt", manifest.find("turned")->chunks[0].record.data_offset + 1);
  manifest = test::value_of(open_torch_file(dir / "a.pt"));
  base::Status outcome;
  (void)load(dir, manifest, "turned", {{0, 0}, {4, 3}}, &outcome);
  CHECK(outcome.code() == base::Code::kCorrupt);
  CHECK(outcome.message().find(dir / "a.pt") != std::string::npos);
  (void)load(dir, manifest, "row", {{0}, {4}});  // a part of the storage has no checksum
  const VerifyReport damaged = verified();
  REQUIRE(damaged.problems.size() == 1);
  CHECK(damaged.problems[0].fqns == Names{"row", "turned"});
  CHECK(damaged.problems[0].file == "a.pt");
  test::flip_bit(dir / "a.pt", 70);
  CHECK(verified().problems.at(0).message.find("CRC of data.pkl") != std::string::npos);
}

TEST_CASE("open torch file: a model of Hugging Face in several files") {
  const TempDir dir;
  test::write_all(dir / "pytorch_model-00001-of-00002.bin", file_of("a"));
  test::write_all(
      dir / "pytorch_model-00002-of-00002.bin",
      torch_file_of(dict({{"b", pickled_floats("0", 12, 0, {4, 3}, {1, 4})}, {"c", number(5)}}), {{"0", twelve()}}));
  test::write_all(dir / "training_args.bin", "something else");
  const std::string index = dir / "pytorch_model.bin.index.json";
  const std::string first = R"("pytorch_model-00001-of-00002.bin")", second = R"("pytorch_model-00002-of-00002.bin")";
  for (const bool has_index : {false, true}) {
    CAPTURE(has_index);
    if (has_index) {
      test::write_all(index, R"({"weight_map":{"a":)" + first + R"(,"n.a":)" + first + R"(,"b":)" + second + "}}");
    }
    const format::Manifest manifest = test::value_of(open_any_checkpoint(has_index ? index : dir.path()));
    CHECK(names_of_all(manifest) == Names{"a", "b", "c", "n.a"});
    CHECK(manifest.files.size() == 2);
    CHECK(load(dir, manifest, "b", {{0, 0}, {4, 3}}) == std::vector<float>{0, 4, 8, 1, 5, 9, 2, 6, 10, 3, 7, 11});
    CHECK(manifest.foreign->text_of(manifest.find("c")->chunks[0].record) == whole(number(5)));
  }
  fs::remove(dir / "pytorch_model-00001-of-00002.bin");
  EXPECT_FAILURE(kCorrupt, "00001-of-00002.bin", open_any_checkpoint(dir.path()));
  fs::remove(index);
  EXPECT_FAILURE(kCorrupt, "00001-of-00002.bin", open_any_checkpoint(dir.path()));
}

TEST_CASE("open torch file: a value that cannot be read is refused when it is asked for") {
  const TempDir dir;
  const std::string tensor = pickled_floats("0", 12, 0, {12}, {1});
  test::write_all(dir / "a.pt", torch_file_of(dict({{"pair", tuple({tensor})}, {"w", tensor}}), {{"0", twelve()}}));
  const format::Manifest manifest = test::value_of(open_torch_file(dir / "a.pt"));
  EXPECT_OK(check_extents(dir.path(), manifest, {&manifest.find("w")->chunks[0]}));
  EXPECT_FAILURE(kUnsupported, "'pair' cannot be read without torch.load: it holds tensors",
                 check_extents(dir.path(), manifest, {&manifest.find("pair")->chunks[0]}));
}

}  // namespace
}  // namespace bytecheckpoint::engine
