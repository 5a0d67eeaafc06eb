// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <string>
#include <utility>

#include "csrc/format/data_file.h"
#include "csrc/format/manifest/manifest.h"
#include "tests/cpp/make_tree.h"

namespace bytecheckpoint::test {

/// Tensors (one in two chunks, one without elements, one opaque, one scalar) and bytes, in two files.
inline format::Manifest sample_manifest() {
  using namespace format;  // NOLINT
  using tensor::DType;
  Manifest manifest;
  manifest.save_id = {1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 16};
  manifest.checkpoint_id = "/ckpt/step-7";
  manifest.user_metadata = R"({"step": 7})";
  for (uint32_t f = 0; f < 2; ++f) {
    FileEntry file;
    file.id.rank = f;
    file.id.file_id[0] = static_cast<uint8_t>(0x10 + f);
    file.name = data_file_name(file.id);
    file.bytes = 1 << 20;
    file.trailer_crc = 77 + f;
    manifest.files.push_back(file);
  }
  const auto tensor = [](std::string fqn, uint32_t ordinal, DType dtype, tensor::Dims sizes) {
    Item item;
    item.fqn = std::move(fqn);
    item.is_tensor = true;
    item.ordinal = ordinal;
    item.tensor.dtype = dtype;
    item.tensor.sizes = std::move(sizes);
    return item;
  };
  Item blob;
  blob.fqn = "extra";
  blob.ordinal = 3;
  blob.chunks.push_back({{}, {RecordKind::kBytes, DType::kNone, 1, 8192, 100, 0, 0}});
  Item empty = tensor("layer.empty", 1, DType::kInt64, {0, 3});
  empty.chunks.push_back({tensor::whole({0, 3}), {RecordKind::kTensor, DType::kInt64, 0, 20032, 900, 20480, 0}});
  Item opaque = tensor("layer.opaque", 4, DType::kFloat32, {});
  opaque.chunks.push_back({tensor::whole({}), {RecordKind::kOpaque, DType::kNone, 1, 16384, 500, 0, 0}});
  Item weight = tensor("layer.weight", 0, DType::kFloat32, {4, 5});
  weight.tensor.requires_grad = true;
  weight.tensor.memory_format = 2;
  weight.chunks.push_back({{{0, 0}, {2, 5}}, {RecordKind::kTensor, DType::kBFloat16, 0, 4096, 1000, 4672, 20}});
  weight.chunks.push_back({{{2, 0}, {2, 5}}, {RecordKind::kTensor, DType::kBFloat16, 1, 4096, 1000, 4672, 20}});
  Item scalar = tensor("layer\xC3\xA9", 2, DType::kFloat64, {});
  scalar.tensor.pin_memory = true;
  scalar.chunks.push_back({tensor::whole({}), {RecordKind::kTensor, DType::kFloat64, 0, 8192, 1000, 8768, 8}});
  manifest.items = {blob, empty, opaque, weight, scalar};
  manifest.planner_data =
      holding(Tree::Kind::kDict, {string("layer.weight"), holding(Tree::Kind::kTuple, {string("layer"), integer(4)})});
  return manifest;
}

}  // namespace bytecheckpoint::test
