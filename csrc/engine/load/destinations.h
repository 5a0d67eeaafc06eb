// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "csrc/base/status.h"
#include "csrc/engine/load/load_phases.h"
#include "csrc/engine/load/scatter.h"
#include "csrc/engine/load/stored_checksums.h"
#include "csrc/engine/load/tensor_place.h"
#include "csrc/engine/open/source_file.h"
#include "csrc/format/manifest/manifest.h"
#include "csrc/planner/load_plan.h"
#include "csrc/staging/device_copies.h"
#include "csrc/tensor/strided_view.h"

namespace bytecheckpoint::engine {

/// The memory that a load fills, and the bytes of the files that go to each part of it. Owns none of this memory.
///
///     add_*            what is added is sorted into phases (`load_phases.h`): scales come before their codes
///     check, scatter   bytes of a slot, to all memory of the first phase that wants some (`scatter.h`)
///     check_archives   once all of the phase is there (`stored_checksums.h`)
///
/// Not thread-safe, but see `is_plain`.
class Destinations {
 public:
  /// \param manifest  Of the checkpoint in `directory`; must outlive this.
  /// \param verify    Compare checksums: of a block before a byte of it is used; of an archive at the end, if there are
  /// no blocks.
  Destinations(std::string directory, const format::Manifest& manifest, bool verify);

  /// Follows the checksums of all that is read, in runs that each read a part of it. \param checksums  Must outlive
  /// this.
  void follow(StoredChecksums* checksums) {
    followed_ = checksums;
    phases_.follow_parts();
  }
  /// Makes the memory of devices known. Call it before such memory is added. \param copies  Must outlive this.
  void set_copies(staging::DeviceCopies* copies) { scatter_.set_copies(copies); }
  /// Returns a device that the first phase fills; kHost if there is none.
  int any_device() const;

  /// Adds a box of a stored chunk.
  /// \param box     A part of the chunk; its offsets count from the chunk's first element.
  /// \param memory  As large as `box`, of the dtype of `place`. It must live until the run ends or `clear` is called.
  /// No memory may be added twice: runs fill it in any order. See `staging::LoadTargets`.
  /// \param device  Whose memory it is.
  /// \returns kInvalidArgument, naming `fqn`, if the box is outside the chunk, or the memory has another shape or
  /// dtype. kUnsupported for memory of a device that is better filled through the host: see `LoadPhases`.
  base::Status add_tensor(const std::string& fqn, const format::Chunk& chunk, const TensorPlace& place,
                          const tensor::Box& box, const tensor::StridedView& memory, int device = staging::kHost);
  /// Adds bytes [begin, end) of a record. Those of one that the manifest itself holds are copied at once.
  /// \param memory  Has end - begin bytes.
  void add_bytes(const format::Record& record, int64_t begin, int64_t end, uint8_t* memory);
  /// Adds a whole record.
  void add_bytes(const format::Record& record, uint8_t* memory) { add_bytes(record, 0, record.bytes, memory); }

  /// What the first phase wants: `ReadSegment::wanted` holds positions in this list.
  const std::vector<planner::WantedBox>& wanted() const { return phases_.first().wanted; }
  /// Ends the first phase when all of it is scattered, so that the next one becomes the first. \returns false if there
  /// is none; then nothing is left.
  bool begin_next_phase();
  bool is_empty() const { return phases_.is_empty(); }
  /// Whether several threads may call `check` and `scatter` at the same time, each with other bytes of the files: the
  /// first phase copies bytes as they are to memory of the host, and computes no checksum of an archive.
  bool is_plain() const;
  /// Returns where in its file the first byte that an entry of `wanted` wants is, and the position behind the last one.
  std::pair<int64_t, int64_t> range_in_file(uint32_t index) const {
    const int64_t begin = phases_.first().wanted[index].offset;
    return {begin, begin + phases_.first().destinations[index].runs.end()};
  }

  /// Returns the memory that a segment goes to as it is, if one entry of `wanted` wants all of it and nobody else any;
  /// else null. Only if `is_plain`.
  uint8_t* memory_of(const planner::ReadSegment& segment, const SourceFile& file) const;

  /// Compares bytes [0, bytes) of `segment` with the checksums of their blocks. Does nothing for a file without blocks.
  /// \returns kCorrupt.
  base::Status check(const uint8_t* slot, const planner::ReadSegment& segment, int64_t bytes,
                     const SourceFile& file) const;
  /// Copies bytes of `segment`, which were checked, to all memory that wants some of them. \returns kCorrupt if a
  /// record ends behind the records of the file. kDevice.
  base::Status scatter(const uint8_t* slot, const planner::ReadSegment& segment, int64_t bytes, const SourceFile& file);
  /// Compares the checksums of what was read whole of other writers' archives. Call it when all of the phase is
  /// scattered. \returns kCorrupt.
  base::Status check_archives();

  /// Forgets all memory, so that nothing can write to it after its owner was told that the run has ended.
  void clear();

 private:
  StoredChecksums& checksums() { return followed_ != nullptr ? *followed_ : own_; }

  const std::string directory_;
  const format::Manifest& manifest_;
  const bool verify_;
  LoadPhases phases_;
  StoredChecksums own_;
  StoredChecksums* followed_ = nullptr;  // in the place of our own
  Scatter scatter_;
};

}  // namespace bytecheckpoint::engine
