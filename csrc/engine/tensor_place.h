// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "csrc/base/status.h"
#include "csrc/format/manifest.h"

namespace bytecheckpoint::engine {

/// Where the elements of a stored chunk lie, and how.
struct TensorPlace {
  tensor::DType dtype = tensor::DType::kNone;
  int64_t data_offset = 0;           // of the first element, from the start of the file
  std::vector<uint32_t> dim_order;   // dims from the outermost stored to the innermost; empty: as they come (row-major)
  std::optional<uint32_t> data_crc;  // of all elements, where only the archive has a checksum
};

/// The place of one of our own tensor records.
TensorPlace place_of(const format::Record& record);

/// Do the files hold what the metadata say? Asked before memory is taken on the word of the metadata.
/// \returns kCorrupt for a chunk without a record or beyond the end of its file; kStorage.
base::Status check_extents(const std::string& directory, const format::Manifest& manifest,
                           const std::vector<const format::Chunk*>& chunks);

/// The places of `chunks`, nothing for one that is not plain row-major or permuted elements: that is a job for
/// torch.load.
///
/// Our own records are in the manifest. Foreign ones are opened: the archive's directory and its pickle are read, in
/// order of files and offsets, by a few threads.
/// \returns kCorrupt, kUnsupported, kStorage, naming file and offset.
base::Result<std::vector<std::optional<TensorPlace>>> locate_tensors(const std::string& directory,
                                                                     const format::Manifest& manifest,
                                                                     const std::vector<const format::Chunk*>& chunks);

}  // namespace bytecheckpoint::engine
