// SPDX-License-Identifier: Apache-2.0
#include <algorithm>

#include "csrc/format/orbax/orbax_tree.h"
#include "csrc/format/orbax/zarr_array.h"
#include "csrc/tensor/box.h"
#include "tests/fuzz/peak_memory.h"
#include "tests/fuzz/targets.h"

namespace bytecheckpoint::fuzz {
namespace {

using base::Code;

bool is_refusal(Code code) {
  return code == Code::kCorrupt || code == Code::kUnsupported;
}

/// The boxes of an array's chunks cover it, and pieces their chunk.
std::string array_holds(const base::Result<format::ZarrArray>& read) {
  if (!read.is_ok()) {
    BCP_HOLDS(is_refusal(read.status().code()));
    return {};
  }
  const format::ZarrArray& array = read.value();
  const tensor::Dims chunks = array.num_chunks(), pieces = array.num_pieces();
  int64_t numel = 0;
  BCP_HOLDS(tensor::checked_numel(array.sizes, &numel));
  for (size_t d = 0; d < array.sizes.size(); ++d) {
    BCP_HOLDS(chunks[d] * array.chunk_sizes[d] >= array.sizes[d]);
    BCP_HOLDS((chunks[d] - 1) * array.chunk_sizes[d] < std::max<int64_t>(array.sizes[d], 1));
    BCP_HOLDS(pieces[d] * array.inner_sizes[d] == array.chunk_sizes[d]);
  }
  BCP_HOLDS(array.piece_bytes() > 0);
  BCP_HOLDS(array.name_of_chunk(chunks).find("..") == std::string::npos);
  return {};
}

std::string index_holds(std::string_view bytes) {
  format::ZarrArray array;
  array.has_index_crc = bytes.size() % 16 == 4;
  if (bytes.size() % 16 != 0 && !array.has_index_crc) return {};
  constexpr int64_t kFileBytes = 1 << 20;
  const auto index = format::read_zarr_index(array, bytes, kFileBytes);
  if (!index.is_ok()) {
    BCP_HOLDS(index.status().code() == Code::kCorrupt);
    return {};
  }
  for (const format::ZarrPiece& piece : index.value()) {
    BCP_HOLDS(piece.offset >= 0 && piece.bytes >= -1 && piece.bytes <= kFileBytes - piece.offset);
  }
  return {};
}

}  // namespace

/// The bytes are any of the files that describe a checkpoint of Orbax, or an index of pieces.
std::string orbax(std::string_view bytes) {
  PeakMemory memory(bytes.size());
  const auto tree = format::read_orbax_tree(bytes);
  const auto strings = format::read_orbax_strings(bytes);
  const auto second = format::read_zarr2(bytes), third = format::read_zarr3(bytes);
  BCP_ALL_HOLD(memory.stop());
  BCP_HOLDS(tree.is_ok() || tree.status().code() == Code::kCorrupt);
  BCP_HOLDS(strings.is_ok() || strings.status().code() == Code::kCorrupt);
  if (tree.is_ok()) {
    const auto& leaves = tree.value().leaves;
    BCP_HOLDS(
        std::is_sorted(leaves.begin(), leaves.end(), [](const auto& a, const auto& b) { return a.name < b.name; }));
  }
  BCP_ALL_HOLD(array_holds(second));
  BCP_ALL_HOLD(array_holds(third));
  return index_holds(bytes);
}

}  // namespace bytecheckpoint::fuzz
