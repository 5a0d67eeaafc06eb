// SPDX-License-Identifier: Apache-2.0
#include "csrc/engine/export/export_file.h"

#include <numeric>
#include <string>
#include <vector>

#include "csrc/base/crc32.h"
#include "csrc/engine/open/open_safetensors.h"
#include "tests/cpp/expect.h"
#include "tests/cpp/temp_dir.h"

namespace bytecheckpoint::engine {
namespace {

using tensor::DType;
using test::TempDir;

/// A safetensors file with one tensor of bytes, [rows, columns]: `value(i)` is byte i.
constexpr int64_t kRows = 5000, kColumns = 4001;

uint8_t value(int64_t i) {
  return static_cast<uint8_t>(i * 31 + i / 997);
}

void write_source(const TempDir& dir) {
  const std::string json = R"({"w":{"dtype":"U8","shape":[5000,4001],"data_offsets":[0,20005000]}})";
  base::ByteWriter out;
  out.u64(json.size());
  out.raw(json);
  std::string bytes = out.take();
  for (int64_t i = 0; i < kRows * kColumns; ++i) bytes.push_back(static_cast<char>(value(i)));
  test::write_all(dir / "model.safetensors", bytes);
}

ExportOptions options_for(const TempDir& dir) {
  ExportOptions options;
  options.reading.directory = dir.path();
  options.path = dir / "out";
  options.progress = [](int64_t) { return true; };
  return options;
}

/// A head, and then one tensor to the end.
FileFrame frame_of(const std::string& head, int64_t offset, int64_t file_bytes) {
  FileFrame frame{{offset}, file_bytes, nullptr};
  frame.before = [head](size_t number, const std::vector<uint32_t>&) { return number == 0 ? head : std::string(); };
  return frame;
}

TEST_CASE("export: a head and tensors, over several slots, with the checksum of all of it") {
  const TempDir dir;
  write_source(dir);
  const auto manifest = std::make_shared<format::Manifest>(test::value_of(open_safetensors(dir.path())));
  const std::string head = "the head";
  const int64_t bytes = 8 + kRows * kColumns;
  const auto exported = test::value_of(
      export_file(options_for(dir), manifest, nullptr, {{"w", DType::kUInt8}}, frame_of(head, 8, bytes)));
  const std::string out = test::read_all(dir / "out");
  REQUIRE(static_cast<int64_t>(out.size()) == bytes);
  CHECK(exported.bytes == bytes);
  CHECK(exported.crc == base::crc32(0, out.data(), out.size()));
  CHECK(test::value_of(checksum_of_file(dir.path(), "out", [](int64_t) { return true; })) == exported.crc);
  CHECK(out.substr(0, 8) == head);
  bool are_equal = true;
  for (int64_t i = 0; i < kRows * kColumns; ++i) {
    are_equal &= static_cast<uint8_t>(out[static_cast<size_t>(8 + i)]) == value(i);
  }
  CHECK(are_equal);
}

TEST_CASE("export: a transposed view, and converted elements") {
  const TempDir dir;
  write_source(dir);
  const auto manifest = std::make_shared<format::Manifest>(test::value_of(open_safetensors(dir.path())));
  CheckpointViewBuilder builder(manifest);
  CheckpointViewBuilder::Tensor turned = test::value_of(builder.tensor("w"));
  turned.view = test::value_of(planner::narrow(turned.view, 0, 1000, 900));
  turned.view = test::value_of(planner::permute(turned.view, {1, 0}));
  EXPECT_OK(builder.add("t", turned));
  const auto view = test::value_of(builder.finish());
  const std::shared_ptr<const format::Manifest> of_view(view, &view->manifest);
  ExportOptions options = options_for(dir);
  options.convert = [](const ElementsToConvert& each) {
    REQUIRE(each.from == DType::kUInt8);
    REQUIRE(each.to == DType::kInt16);
    for (int64_t i = 0; i < each.count; ++i) {
      const auto wide = static_cast<int16_t>(each.elements[i]);
      std::memcpy(each.converted + 2 * i, &wide, 2);
    }
    return base::Status::ok();
  };
  const int64_t bytes = 2 * 900 * kColumns;
  EXPECT_OK(export_file(options, of_view, view.get(), {{"t", DType::kInt16}}, frame_of("", 0, bytes)));
  const std::string out = test::read_all(dir / "out");
  REQUIRE(static_cast<int64_t>(out.size()) == bytes);
  bool are_equal = true;
  for (int64_t c = 0; c < kColumns; ++c) {
    for (int64_t r = 0; r < 900; ++r) {
      int16_t got;
      std::memcpy(&got, out.data() + 2 * (c * 900 + r), 2);
      are_equal &= got == value((1000 + r) * kColumns + c);
    }
  }
  CHECK(are_equal);
}

TEST_CASE("export: what does not fit is refused, damage and interruption are told") {
  const TempDir dir;
  write_source(dir);
  const auto manifest = std::make_shared<format::Manifest>(test::value_of(open_safetensors(dir.path())));
  const int64_t bytes = kRows * kColumns;
  ExportOptions options = options_for(dir);
  EXPECT_FAILURE(kInvalidArgument, "no such tensor",
                 export_file(options, manifest, nullptr, {{"x", DType::kUInt8}}, frame_of("", 0, 1)));
  EXPECT_FAILURE(kInvalidArgument, "it begins at -1",
                 export_file(options, manifest, nullptr, {{"w", DType::kUInt8}}, frame_of("", -1, bytes)));
  EXPECT_FAILURE(kInvalidArgument, "the file at",
                 export_file(options, manifest, nullptr, {{"w", DType::kUInt8}}, frame_of("", 0, bytes - 1)));
  EXPECT_FAILURE(kInvalidArgument, "1 tensors at 0 places",
                 export_file(options, manifest, nullptr, {{"w", DType::kUInt8}}, {{}, bytes, nullptr}));
  EXPECT_FAILURE(kInvalidArgument, "4 bytes for a gap from 0 to 5",
                 export_file(options, manifest, nullptr, {{"w", DType::kUInt8}}, frame_of("head", 5, bytes + 5)));
  options.path = dir / "second";
  int64_t last = 0;
  options.progress = [&](int64_t done) {
    last = done;
    return done == 0;
  };
  EXPECT_CODE(kCancelled, export_file(options, manifest, nullptr, {{"w", DType::kUInt8}}, frame_of("", 0, bytes)));
  CHECK(last > 0);
  EXPECT_FAILURE(kStorage, dir / "second",
                 export_file(options, manifest, nullptr, {{"w", DType::kUInt8}}, frame_of("", 0, bytes)));
  options = options_for(dir);
  options.path = dir / "other";
  test::write_all(dir / "model.safetensors", test::read_all(dir / "model.safetensors").substr(0, 10'000'000));
  EXPECT_CODE(kChanged, export_file(options, manifest, nullptr, {{"w", DType::kUInt8}}, frame_of("", 0, bytes)));
}

}  // namespace
}  // namespace bytecheckpoint::engine
