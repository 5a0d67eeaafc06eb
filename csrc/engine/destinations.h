// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "csrc/base/status.h"
#include "csrc/engine/source_file.h"
#include "csrc/engine/tensor_place.h"
#include "csrc/format/manifest.h"
#include "csrc/planner/load_plan.h"
#include "csrc/tensor/strided_view.h"

namespace bytecheckpoint::engine {

/// What is wanted of a chunk, as a planner sees it: every chunk is row-major once its dims are renamed.
///
/// \param place  Of the chunk, from `locate_tensors`.
/// \param box    Part of the chunk's own box, offsets counted from the chunk's first element.
planner::WantedBox wanted_of(const format::Chunk& chunk, const TensorPlace& place, const tensor::Box& box);
/// The whole record.
planner::WantedBox wanted_of(const format::Record& record);

/// Memory that a load fills, and what of which files it is filled with. Owns none of it. Not thread-safe.
class Destinations {
 public:
  /// \param manifest  Of the checkpoint in `directory`; outlives this.
  /// \param verify    Compare checksums: of blocks before a byte of them is used, of archives where they are all there
  /// is.
  Destinations(std::string directory, const format::Manifest& manifest, bool verify);

  /// \param memory  As large as `box`, of the stored dtype.
  base::Status add_tensor(const std::string& fqn, const format::Chunk& chunk, const TensorPlace& place,
                          const tensor::Box& box, const tensor::StridedView& memory);
  /// `memory` has record.bytes bytes.
  void add_bytes(const format::Record& record, uint8_t* memory);

  /// In the order in which they were added; segments name them by their numbers.
  const std::vector<planner::WantedBox>& wanted() const { return wanted_; }

  /// Compares bytes [0, bytes) of `segment` with the checksums of their blocks, if they have any.
  base::Status check(const uint8_t* slot, const planner::ReadSegment& segment, int64_t bytes,
                     const SourceFile& file) const;
  /// Copies what `segment` has for them, of bytes that were checked.
  base::Status scatter(const uint8_t* slot, const planner::ReadSegment& segment, int64_t bytes, const SourceFile& file);
  /// When all is scattered: compares the checksums of foreign archives that are wanted whole.
  base::Status check_archives();

  /// Later scatters must not write to memory that its owner was told is no longer needed.
  void clear();

 private:
  struct Destination {
    tensor::BoxRuns runs;
    uint8_t* memory;
    std::optional<uint32_t> data_crc;  // of the archive, if all of it is wanted
  };
  /// Part of the data of one destination, summed as it went by.
  struct Summed {
    uint32_t destination;
    int64_t begin, end;  // bytes of the chunk
    uint32_t crc;
  };

  const std::string directory_;
  const format::Manifest& manifest_;
  const bool verify_;
  std::vector<planner::WantedBox> wanted_;
  std::vector<Destination> destinations_;
  std::vector<Summed> summed_;
};

}  // namespace bytecheckpoint::engine
