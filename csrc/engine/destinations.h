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

/// Describes a box of a chunk for the planner.
///
/// \param place  The chunk's, from `locate_tensors`.
/// \param box    A part of the chunk; its offsets count from the chunk's first element.
planner::WantedBox wanted_of(const format::Chunk& chunk, const TensorPlace& place, const tensor::Box& box);
/// The same for all bytes of a record.
planner::WantedBox wanted_of(const format::Record& record);

/// The memory that a load fills, and the bytes of the files that go to each part of it. Owns none of this memory. Not
/// thread-safe.
class Destinations {
 public:
  /// \param manifest  Of the checkpoint in `directory`; must outlive this.
  /// \param verify    Compare checksums: of a block before a byte of it is used; of an archive at the end, if there are
  /// no blocks.
  Destinations(std::string directory, const format::Manifest& manifest, bool verify);

  /// Adds a box of a stored chunk.
  /// \param box     A part of the chunk; its offsets count from the chunk's first element.
  /// \param memory  As large as `box`, of the stored dtype. It must live until the run ends or `clear` is called.
  /// \returns kInvalidArgument, naming `fqn`, if the box is outside the chunk, or the memory has another shape or
  /// dtype.
  base::Status add_tensor(const std::string& fqn, const format::Chunk& chunk, const TensorPlace& place,
                          const tensor::Box& box, const tensor::StridedView& memory);
  /// Adds a whole record. \param memory  Has record.bytes bytes.
  void add_bytes(const format::Record& record, uint8_t* memory);

  /// In the order of the `add_` calls: `ReadSegment::wanted` holds positions in this list.
  const std::vector<planner::WantedBox>& wanted() const { return wanted_; }

  /// Compares bytes [0, bytes) of `segment` with the checksums of their blocks. Does nothing for a file without blocks.
  /// \returns kCorrupt.
  base::Status check(const uint8_t* slot, const planner::ReadSegment& segment, int64_t bytes,
                     const SourceFile& file) const;
  /// Copies bytes of `segment`, which were checked, to all memory that wants some of them. \returns kCorrupt if a
  /// record ends behind the records of the file.
  base::Status scatter(const uint8_t* slot, const planner::ReadSegment& segment, int64_t bytes, const SourceFile& file);
  /// Compares the checksums of other writers' archives that were wanted whole. Call it when all is scattered. \returns
  /// kCorrupt.
  base::Status check_archives();

  /// Forgets all memory, so that nothing can write to it after its owner was told that the run has ended.
  void clear();

 private:
  struct Destination {
    tensor::BoxRuns runs;
    uint8_t* memory;
    std::optional<uint32_t> data_crc;  // the archive's, if all of it is wanted
  };
  /// A part of the data of one destination, and the CRC that was taken when it was scattered.
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
