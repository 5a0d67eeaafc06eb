// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <algorithm>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "csrc/format/manifest/manifest.h"
#include "tests/cpp/random_box.h"

namespace bytecheckpoint::test {

/// Cuts a tensor into chunks that do not overlap, at random places of each dim, the same or different in each part.
inline void draw_partition(Random* random, const tensor::Box& part, size_t dim, bool grid,
                           const std::vector<std::vector<int64_t>>& cuts, std::vector<tensor::Box>* out) {
  if (dim == part.num_dims()) return out->push_back(part);
  std::vector<int64_t> edges = cuts[dim];
  if (!grid) {
    edges = {0, part.sizes[dim]};
    for (int64_t n = draw(random, 0, 3); n > 0; --n) edges.push_back(draw(random, 0, part.sizes[dim]));
  }
  std::sort(edges.begin(), edges.end());
  for (size_t e = 0; e + 1 < edges.size(); ++e) {
    tensor::Box slice = part;
    slice.offsets[dim] = edges[e];
    slice.sizes[dim] = edges[e + 1] - edges[e];
    draw_partition(random, slice, dim + 1, grid, cuts, out);
  }
}

inline std::vector<tensor::Box> draw_partition(Random* random, const tensor::Dims& sizes, int64_t max_cuts) {
  std::vector<std::vector<int64_t>> cuts(sizes.size());
  const bool even = draw(random, 0, 1) == 0;
  for (size_t d = 0; d < sizes.size(); ++d) {
    const int64_t parts = draw(random, 1, std::max<int64_t>(1, std::min(max_cuts, sizes[d])));
    cuts[d] = {0, sizes[d]};
    for (int64_t n = 1; n < parts; ++n) cuts[d].push_back(even ? n * sizes[d] / parts : draw(random, 0, sizes[d]));
  }
  std::vector<tensor::Box> boxes;
  draw_partition(random, tensor::whole(sizes), 0, draw(random, 0, 2) != 0, cuts, &boxes);
  return boxes;
}

/// A valid manifest of any shapes. Chunks of an item never overlap, and are mostly in order.
inline format::Manifest draw_manifest(Random* random, int64_t max_items, int64_t max_cuts) {
  using namespace format;  // NOLINT
  Manifest manifest;
  for (uint8_t& byte : manifest.save_id) byte = static_cast<uint8_t>((*random)());
  const int64_t num_files = draw(random, 1, 5);
  for (int64_t f = 0; f < num_files; ++f) {
    FileEntry file;
    file.id.rank = static_cast<uint32_t>(f);
    file.id.file_id[0] = static_cast<uint8_t>((*random)());
    file.name = data_file_name(file.id);
    file.bytes = int64_t{1} << 40;
    manifest.files.push_back(file);
  }
  std::set<std::string> names;
  for (int64_t n = draw(random, 0, max_items); n > 0; --n) {
    names.insert(std::string(static_cast<size_t>(draw(random, 0, 3)), 'x') + std::to_string(draw(random, 0, 999)));
  }
  for (const std::string& fqn : names) {
    Item item;
    item.fqn = fqn;
    item.ordinal = static_cast<uint32_t>(manifest.items.size());
    item.is_tensor = draw(random, 0, 5) != 0;
    std::vector<tensor::Box> boxes = {{}};
    if (item.is_tensor) {
      item.tensor.dtype = tensor::DType::kUInt8;
      item.tensor.sizes = draw_sizes(random, 4, 20);
      boxes = draw_partition(random, item.tensor.sizes, max_cuts);
      if (draw(random, 0, 9) == 0) boxes.pop_back();
      item.is_partial = draw(random, 0, 19) == 0;
      if (draw(random, 0, 4) == 0) std::shuffle(boxes.begin(), boxes.end(), *random);
    }
    for (tensor::Box& box : boxes) {
      int64_t numel = 0;
      (void)tensor::checked_numel(box.sizes, &numel);
      const auto file = static_cast<uint32_t>(draw(random, 0, num_files - 1));
      const int64_t offset = 4096 + 64 * draw(random, 0, 1000);
      Record record{RecordKind::kBytes, tensor::DType::kNone, file, offset, numel + 512, 0, 0};
      if (item.is_tensor) {
        record.kind = RecordKind::kTensor;
        record.stored_dtype = item.tensor.dtype;
        record.data_offset = offset + 64;
        record.data_bytes = numel;
      }
      item.chunks.push_back({std::move(box), record});
    }
    manifest.items.push_back(std::move(item));
  }
  return manifest;
}

}  // namespace bytecheckpoint::test
