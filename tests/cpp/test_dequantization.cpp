// SPDX-License-Identifier: Apache-2.0
#include "csrc/engine/load/dequantization.h"

#include <cstring>
#include <string>
#include <utility>
#include <vector>

#include "csrc/base/bytes.h"
#include "csrc/engine/load/load_job.h"
#include "csrc/engine/open/open_safetensors.h"
#include "csrc/tensor/small_floats.h"
#include "tests/cpp/expect.h"
#include "tests/cpp/random_box.h"
#include "tests/cpp/rounds.h"
#include "tests/cpp/temp_dir.h"

namespace bytecheckpoint::engine {
namespace {

using tensor::Box;
using tensor::Dims;
using tensor::DType;
using test::Random;
using test::TempDir;

constexpr int64_t kRows = 300, kColumns = 260, kBlock = 32, kRowBlocks = 10, kColumnBlocks = 9;
constexpr int64_t kPairs = 7, kGroups = 5;  // of 4-bit codes: rows of 5 groups of 8

uint8_t code_of(int64_t i) {
  return static_cast<uint8_t>((i * 37 + i / 91) % 0x7F);
}
float scale_of(int64_t i) {
  return static_cast<float>(i % 31 + 1) / 8;
}
uint8_t exponent_of(int64_t i) {
  return static_cast<uint8_t>(120 + i % 11);
}

void write_source(const TempDir& dir) {
  const std::string json = R"({"w":{"dtype":"F8_E4M3","shape":[300,260],"data_offsets":[0,78000]},)"
                           R"("s":{"dtype":"F32","shape":[10,9],"data_offsets":[78000,78360]},)"
                           R"("b":{"dtype":"U8","shape":[7,20],"data_offsets":[78360,78500]},)"
                           R"("e":{"dtype":"U8","shape":[7,5],"data_offsets":[78500,78535]}})";
  base::ByteWriter out;
  out.u64(json.size());
  out.raw(json);
  std::string bytes = out.take();
  for (int64_t i = 0; i < kRows * kColumns; ++i) bytes.push_back(static_cast<char>(code_of(i)));
  for (int64_t i = 0; i < kRowBlocks * kColumnBlocks; ++i) {
    const float scale = scale_of(i);
    bytes.append(reinterpret_cast<const char*>(&scale), sizeof scale);
  }
  for (int64_t i = 0; i < kPairs * kGroups * 4; ++i) bytes.push_back(static_cast<char>(code_of(i) * 2 + 1));
  for (int64_t i = 0; i < kPairs * kGroups; ++i) bytes.push_back(static_cast<char>(exponent_of(i)));
  test::write_all(dir / "model.safetensors", bytes);
}

/// A tensor of the view, and the value of each of its elements, row-major.
struct Made {
  CheckpointViewBuilder::Tensor tensor;
  std::vector<float> values;
};

std::vector<float> values_of_w() {
  std::vector<float> values;
  for (int64_t i = 0; i < kRows * kColumns; ++i) {
    const int64_t block = i / kColumns / kBlock * kColumnBlocks + i % kColumns / kBlock;
    values.push_back(tensor::values_of_codes(DType::kFloat8E4M3FN)[code_of(i)] * scale_of(block));
  }
  return values;
}

std::vector<float> values_of_b() {
  std::vector<float> values;
  for (int64_t i = 0; i < kPairs * kGroups * 8; ++i) {
    const int byte = code_of(i / 2) * 2 + 1;
    const float code = tensor::values_of_codes(DType::kFloat4E2M1FNX2)[i % 2 == 0 ? byte & 0xF : byte >> 4 & 0xF];
    values.push_back(code * tensor::float_of_bits(static_cast<uint32_t>(exponent_of(i / 8)) << 23));
  }
  return values;
}

/// Returns the elements at `box` of row-major `values`, with dims in the order `dims`.
std::vector<float> taken(const std::vector<float>& values, const Dims& sizes, const Box& box,
                         const std::vector<size_t>& dims) {
  const Dims strides = tensor::row_major_strides(sizes);
  Dims out_sizes(dims.size());
  for (size_t d = 0; d < dims.size(); ++d) out_sizes[d] = box.sizes[dims[d]];
  std::vector<float> out;
  test::for_each_index(out_sizes, [&](const Dims& index) {
    int64_t at = 0;
    for (size_t d = 0; d < dims.size(); ++d) at += (box.offsets[dims[d]] + index[d]) * strides[dims[d]];
    out.push_back(values[static_cast<size_t>(at)]);
  });
  return out;
}

/// Cuts, turns and reshapes a tensor and its values at random.
void change(Random* random, bool is_packed, Made* made) {
  planner::TensorView& view = made->tensor.view;
  for (int64_t left = test::draw(random, 0, 4); left > 0; --left) {
    const Dims sizes = view.sizes;
    Box box = tensor::whole(sizes);
    std::vector<size_t> dims(sizes.size());
    for (size_t d = 0; d < dims.size(); ++d) dims[d] = d;
    const int64_t kind = test::draw(random, 0, 2);
    if (kind == 0) {
      const auto dim = static_cast<size_t>(test::draw(random, 0, static_cast<int64_t>(sizes.size()) - 1));
      box.offsets[dim] = test::draw(random, 0, sizes[dim] - 1);
      box.sizes[dim] = test::draw(random, 1, sizes[dim] - box.offsets[dim]);
      view = test::value_of(planner::narrow(view, dim, box.offsets[dim], box.sizes[dim]));
    } else if (kind == 1) {
      std::shuffle(dims.begin(), dims.end(), *random);
      view = test::value_of(planner::permute(view, dims));
    } else if (!is_packed) {
      int64_t numel = 0;
      REQUIRE(tensor::checked_numel(sizes, &numel));
      const int64_t parts = test::draw(random, 1, 4);
      if (numel % parts == 0) view = test::value_of(planner::reshape(view, {parts, numel / parts}));
      continue;  // the values keep their order
    }
    made->values = taken(made->values, sizes, box, dims);
  }
}

void load_and_check(Random* random, const TempDir& dir, const CheckpointView& view, const std::vector<float>& values) {
  const format::Item& item = *view.manifest.find("x");
  std::vector<ChunkInRecord> chunks;
  for (size_t c = 0; c < item.chunks.size(); ++c) chunks.push_back({&item.chunks[c], view.find(item, c)});
  const auto places = test::value_of(locate_tensors(dir.path(), view.manifest, chunks));
  const Box wanted = test::draw_box(random, item.tensor.sizes);
  int64_t numel = 0;
  REQUIRE(tensor::checked_numel(wanted.sizes, &numel));
  std::vector<float> got(static_cast<size_t>(numel), -1);
  tensor::StridedView memory{reinterpret_cast<uint8_t*>(got.data()), DType::kFloat32, wanted.sizes, {}};
  memory.strides_bytes = tensor::row_major_strides(wanted.sizes);
  for (int64_t& stride : memory.strides_bytes) stride *= 4;
  LoadJob job({dir.path(), {}, true, true, 1, 16 << 20, {}, 0}, view.manifest);
  for (size_t c = 0; c < chunks.size(); ++c) {
    Box common;
    if (!tensor::intersect(item.chunks[c].box, wanted, &common)) continue;
    Dims within = common.offsets;
    for (size_t d = 0; d < within.size(); ++d) {
      within[d] -= wanted.offsets[d];
      common.offsets[d] -= item.chunks[c].box.offsets[d];
    }
    EXPECT_OK(job.destinations().add_tensor("x", item.chunks[c], *places[c], common,
                                            tensor::part_of(memory, within, common.sizes)));
  }
  EXPECT_OK(job.run([] { return false; }));
  std::vector<size_t> dims(wanted.num_dims());
  for (size_t d = 0; d < dims.size(); ++d) dims[d] = d;
  REQUIRE(got == taken(values, item.tensor.sizes, wanted, dims));
}

TEST_CASE("dequantization: any box of any view has the values of its codes") {
  const TempDir dir;
  write_source(dir);
  const auto manifest = std::make_shared<format::Manifest>(test::value_of(open_safetensors(dir.path())));
  Random random(29);
  for (int round = 0; round < test::rounds(400); ++round) {
    CheckpointViewBuilder builder(manifest);
    const bool is_packed = round % 3 == 0;
    Made made;
    if (is_packed) {
      made.tensor = test::value_of(builder.dequantized(test::value_of(builder.tensor("b")),
                                                       test::value_of(builder.tensor("e")), {1, 8}, DType::kFloat32,
                                                       /*is_packed=*/true));
      made.values = values_of_b();
    } else {
      made.tensor =
          test::value_of(builder.dequantized(test::value_of(builder.tensor("w")), test::value_of(builder.tensor("s")),
                                             {kBlock, kBlock}, DType::kFloat32, /*is_packed=*/false));
      made.values = values_of_w();
    }
    change(&random, is_packed, &made);
    EXPECT_OK(builder.add("x", made.tensor));
    load_and_check(&random, dir, *test::value_of(builder.finish()), made.values);
  }
}

TEST_CASE("dequantization: what does not fit is refused") {
  const TempDir dir;
  write_source(dir);
  auto manifest = std::make_shared<format::Manifest>(test::value_of(open_safetensors(dir.path())));
  CheckpointViewBuilder builder(manifest);
  const auto of = [&](const char* name) { return test::value_of(builder.tensor(name)); };
  const auto w = of("w"), s = of("s"), b = of("b"), e = of("e");
  const auto make = [&](const auto& codes, const auto& scales, const Dims& block, DType values, bool is_packed) {
    return builder.dequantized(codes, scales, block, values, is_packed);
  };
  EXPECT_FAILURE(kInvalidArgument, "float32 is no dtype of quantized", make(s, s, {1, 1}, DType::kFloat32, false));
  EXPECT_FAILURE(kInvalidArgument, "uint8 is no dtype of quantized", make(b, e, {1, 4}, DType::kFloat32, false));
  EXPECT_FAILURE(kInvalidArgument, "float8_e4m3fn is no dtype of scales", make(w, w, {1, 1}, DType::kFloat32, false));
  EXPECT_FAILURE(kInvalidArgument, "this is no dtype to", make(w, s, {kBlock, kBlock}, DType::kNone, false));
  EXPECT_FAILURE(kInvalidArgument, "not one for each block", make(w, s, {kBlock, INT64_MAX}, DType::kFloat32, false));
  EXPECT_FAILURE(kInvalidArgument, "not one for each block", make(w, s, {kBlock}, DType::kFloat32, false));
  EXPECT_FAILURE(kInvalidArgument, "not one for each block", make(w, s, {-1, kBlock}, DType::kFloat32, false));
  auto halves = test::value_of(make(b, e, {1, 8}, DType::kBFloat16, true));
  halves.view = test::value_of(planner::reshape(halves.view, {7, 8, 5}));
  EXPECT_FAILURE(kUnsupported, "'x': a dim with pairs", builder.add("x", halves));
  auto huge = b;
  huge.view.sizes = {int64_t{1} << 62, 1};
  EXPECT_FAILURE(kInvalidArgument, "overflows", make(huge, e, {1, 8}, DType::kFloat32, true));
  auto gap = s;
  gap.view.boxes.front().box.sizes[0] -= 1;
  EXPECT_FAILURE(kInvalidArgument, "in no stored chunk", make(w, gap, {kBlock, kBlock}, DType::kFloat32, false));
  auto twice = test::value_of(make(w, s, {kBlock, kBlock}, DType::kFloat32, false));
  EXPECT_FAILURE(kInvalidArgument, "quantized themselves", make(w, twice, {1, 1}, DType::kFloat32, false));
}

TEST_CASE("dequantization: a record of another dtype than the metadata say") {
  const TempDir dir;
  write_source(dir);
  const auto manifest = std::make_shared<format::Manifest>(test::value_of(open_safetensors(dir.path())));
  for (const std::string wrong : {"w", "s"}) {
    auto changed = std::make_shared<format::Manifest>(*manifest);
    for (format::Item& item : changed->items) {
      if (item.fqn == wrong) item.chunks.front().record.stored_dtype = DType::kUInt8;
    }
    CheckpointViewBuilder builder(changed);
    EXPECT_OK(builder.add("x", test::value_of(builder.dequantized(test::value_of(builder.tensor("w")),
                                                                  test::value_of(builder.tensor("s")), {kBlock, kBlock},
                                                                  DType::kFloat32, false))));
    const auto view = test::value_of(builder.finish());
    const format::Item& item = view->manifest.items.front();
    EXPECT_FAILURE(kUnsupported, dir / "model.safetensors",
                   locate_tensors(dir.path(), view->manifest, {{&item.chunks.front(), view->find(item, 0)}}));
  }
}

}  // namespace
}  // namespace bytecheckpoint::engine
