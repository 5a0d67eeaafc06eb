// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "csrc/base/status.h"
#include "csrc/engine/load/checkpoint_view.h"
#include "csrc/format/manifest/manifest.h"

namespace bytecheckpoint::engine {

struct PlacedCodes;

/// Where the elements of a chunk are in a file.
struct TensorPlace {
  tensor::DType dtype = tensor::DType::kNone;
  int64_t data_offset = 0;                     // of the first element, from the start of the file
  tensor::Dims strides;                        // of each dim of the chunk, in elements
  std::optional<format::StoredCrc> stretch{};  // of another writer's: what has a checksum, and the elements in it
  bool fills_stretch = false;                  // no other bytes are in it
  /// Set if the elements are dequantized; then `data_offset` is that of the record's first code, `strides` count codes,
  /// and `dtype` is that of the values.
  std::shared_ptr<const PlacedCodes> codes;
};

/// Returns the place of a chunk that is all of a record of ours.
TensorPlace place_of(const format::Chunk& chunk);

/// Checks that the files are long enough for the records that the metadata names. Call it before memory is allocated
/// for sizes that only the metadata claims.
/// \returns kCorrupt for a chunk without a record or beyond the end of its file. kUnsupported, with the reason, for a
/// kRefused one. kStorage.
base::Status check_extents(const std::string& directory, const format::Manifest& manifest,
                           const std::vector<const format::Chunk*>& chunks);

/// Finds the places of `chunks`; nothing for a chunk whose elements are not plain, dense and row-major or permuted:
/// torch.load must read that one, and a view of such a record is kUnsupported.
///
/// Places of our own records, of safetensors and of files of torch.save are in the manifest. Of other records, each
/// archive is opened, and its directory and its pickle are read, in the order of files and offsets, by up to 4 threads.
/// \returns kCorrupt, kUnsupported or kStorage, naming file and offset.
base::Result<std::vector<std::optional<TensorPlace>>> locate_tensors(const std::string& directory,
                                                                     const format::Manifest& manifest,
                                                                     const std::vector<ChunkInRecord>& chunks);

}  // namespace bytecheckpoint::engine
