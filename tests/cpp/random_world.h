// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <algorithm>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "csrc/planner/inventory.h"
#include "csrc/planner/inventory_blob.h"
#include "csrc/planner/merge_inventories.h"
#include "tests/cpp/expect.h"
#include "tests/cpp/random_box.h"

namespace bytecheckpoint::test {

/// One entry as one rank holds it.
struct HeldEntry {
  std::string fqn;
  planner::EntryKind kind = planner::EntryKind::kBytes;
  std::string path;
  tensor::TensorInfo info;
  bool can_split = true;
  std::vector<tensor::Box> boxes;  // of a shard
};

/// Encodes what one rank of a world holds.
using World = std::vector<std::vector<HeldEntry>>;

inline std::string blob_of(uint32_t rank, const std::vector<HeldEntry>& held) {
  planner::InventoryBuilder builder(rank);
  for (const HeldEntry& e : held) EXPECT_OK(builder.add(e.fqn, e.kind, e.path, e.info, e.can_split, e.boxes));
  return planner::encode_inventory(value_of(builder.finish()));
}

inline std::vector<std::string> blobs_of(const World& world) {
  std::vector<std::string> blobs;
  for (uint32_t rank = 0; rank < world.size(); ++rank) blobs.push_back(blob_of(rank, world[rank]));
  return blobs;
}

inline planner::Inventory merged(const std::vector<std::string>& blobs) {
  return value_of(planner::merge_inventories(std::vector<std::string_view>(blobs.begin(), blobs.end())));
}

inline tensor::TensorInfo info_of(tensor::Dims sizes, tensor::DType dtype = tensor::DType::kBFloat16) {
  tensor::TensorInfo info;
  info.dtype = dtype;
  info.sizes = std::move(sizes);
  return info;
}

/// A mesh: ranks in row-major order, and the tensor dim that each axis shards (-1: the axis replicates).
struct Mesh {
  std::vector<uint32_t> ranks;
  tensor::Dims axes;
  std::vector<int64_t> placements;
};

/// The box that member `position` of the mesh holds: chunks as `torch.chunk` cuts them, then empty ones at the end, as
/// in DTensor.
inline tensor::Box shard_of(const Mesh& mesh, size_t position, const tensor::Dims& sizes) {
  tensor::Box box = tensor::whole(sizes);
  auto rest = static_cast<int64_t>(position);
  std::vector<int64_t> coordinate(mesh.axes.size());
  for (size_t axis = mesh.axes.size(); axis-- > 0;) {
    coordinate[axis] = rest % mesh.axes[axis];
    rest /= mesh.axes[axis];
  }
  for (size_t axis = 0; axis < mesh.axes.size(); ++axis) {
    if (mesh.placements[axis] < 0) continue;
    const auto d = static_cast<size_t>(mesh.placements[axis]);
    const int64_t full = (box.sizes[d] + mesh.axes[axis] - 1) / mesh.axes[axis];
    const int64_t begin = std::min(full * coordinate[axis], box.sizes[d]);
    const int64_t size = std::min(full, box.sizes[d] - begin);
    box.offsets[d] = size == 0 ? sizes[d] : box.offsets[d] + begin;
    box.sizes[d] = size;
  }
  return box;
}

/// Gives the entry to the members of the mesh.
inline void add_sharded(World* world, const std::string& fqn, const tensor::TensorInfo& info, const Mesh& mesh,
                        bool can_split = true) {
  for (size_t i = 0; i < mesh.ranks.size(); ++i) {
    HeldEntry entry{fqn, planner::EntryKind::kShard, "", info, can_split, {shard_of(mesh, i, info.sizes)}};
    (*world)[mesh.ranks[i]].push_back(entry);
  }
}

inline void add_replicated(World* world, const std::string& fqn, const tensor::TensorInfo& info,
                           bool can_split = true) {
  for (auto& held : *world) held.push_back(HeldEntry{fqn, planner::EntryKind::kTensor, "", info, can_split, {}});
}

inline Mesh draw_mesh(Random* random, uint32_t num_ranks, size_t num_dims) {
  Mesh mesh;
  mesh.ranks.resize(num_ranks);
  for (uint32_t rank = 0; rank < num_ranks; ++rank) mesh.ranks[rank] = rank;
  if (draw(random, 0, 3) == 0) std::shuffle(mesh.ranks.begin(), mesh.ranks.end(), *random);
  if (draw(random, 0, 3) == 0) mesh.ranks.resize(static_cast<size_t>(draw(random, 1, num_ranks)));  // a pipeline stage
  for (auto left = static_cast<int64_t>(mesh.ranks.size()); left > 1 || mesh.axes.empty();) {
    int64_t axis = draw(random, 1, left);
    while (left % axis != 0) --axis;
    if (mesh.axes.size() == 2) axis = left;
    mesh.axes.push_back(axis);
    left /= axis;
    mesh.placements.push_back(num_dims == 0 ? -1 : draw(random, -1, static_cast<int64_t>(num_dims) - 1));
  }
  return mesh;
}

/// Objects, plain tensors and shards of meshes, small enough to check element by element. Sometimes every rank has the
/// entries in its own order.
inline World draw_world(Random* random, uint32_t num_ranks) {
  World world(num_ranks);
  const int64_t num_entries = draw(random, 0, 12);
  for (int64_t e = 0; e < num_entries; ++e) {
    const std::string fqn = "layers." + std::to_string(e * 7 % 13) + std::string(static_cast<size_t>(e % 3), 'w');
    const auto dtype = draw(random, 0, 9) == 0 ? tensor::DType::kQInt8 : draw_plain_dtype(random);
    const tensor::TensorInfo info = info_of(draw_sizes(random, 3, 11), dtype);
    const bool can_split = draw(random, 0, 5) != 0;
    switch (draw(random, 0, 4)) {
      case 0:
        for (auto& held : world) {
          if (&held == &world[0] || draw(random, 0, 2) != 0)
            held.push_back(HeldEntry{fqn, {}, "path of " + fqn, {}, {}, {}});
        }
        break;
      case 1:
        add_replicated(&world, fqn, info, can_split);
        break;
      default:
        add_sharded(&world, fqn, info, draw_mesh(random, num_ranks, info.sizes.size()), can_split);
    }
  }
  if (draw(random, 0, 3) == 0) {
    for (auto& held : world) std::shuffle(held.begin(), held.end(), *random);
  }
  return world;
}

}  // namespace bytecheckpoint::test
