// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <deque>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "csrc/base/status.h"
#include "csrc/engine/load/tensor_place.h"
#include "csrc/engine/open/source_file.h"
#include "csrc/format/manifest/manifest.h"
#include "csrc/planner/load_plan.h"
#include "csrc/staging/dequantize.h"
#include "csrc/staging/device_copies.h"
#include "csrc/tensor/strided_view.h"

namespace bytecheckpoint::engine {

/// Describes a box of a chunk for the planner.
///
/// \param place  The chunk's, from `locate_tensors`.
/// \param box    A part of the chunk; its offsets count from the chunk's first element.
planner::WantedBox wanted_of(const format::Chunk& chunk, const TensorPlace& place, const tensor::Box& box);
/// The same for all bytes of a record.
planner::WantedBox wanted_of(const format::Record& record);

/// The memory that a load fills, and the bytes of the files that go to each part of it. Owns none of this memory.
///
/// Values that are dequantized need their scales first. So what was added is read in phases: each reads the codes whose
/// scales the phase before has read, and the scales of the next phase, up to `kMostScaleBytes` of them.
///
///     phase 0   all other tensors and bytes, scales of a
///     phase 1   codes of a, scales of b
///     phase 2   codes of b
///
/// Not thread-safe, but see `is_plain`.
class Destinations {
 public:
  /// \param manifest  Of the checkpoint in `directory`; must outlive this.
  /// \param verify    Compare checksums: of a block before a byte of it is used; of an archive at the end, if there are
  /// no blocks.
  Destinations(std::string directory, const format::Manifest& manifest, bool verify);

  /// The most bytes of scales that a phase reads. A box that needs more is cut, as long as it can be.
  static constexpr int64_t kMostScaleBytes = 16 << 20;

  /// Makes the memory of devices known. Call it before such memory is added. \param copies  Must outlive this.
  void set_copies(staging::DeviceCopies* copies) { copies_ = copies; }
  /// Returns a device that the first phase fills; kHost if there is none.
  int any_device() const;

  /// Adds a box of a stored chunk.
  /// \param box     A part of the chunk; its offsets count from the chunk's first element.
  /// \param memory  As large as `box`, of the dtype of `place`. It must live until the run ends or `clear` is called.
  /// No memory may be added twice: runs fill it in any order. See `staging::LoadTargets`.
  /// \param device  Whose memory it is.
  /// \returns kInvalidArgument, naming `fqn`, if the box is outside the chunk, or the memory has another shape or
  /// dtype. kUnsupported for memory of a device that is better filled through the host: see `suits_devices`.
  base::Status add_tensor(const std::string& fqn, const format::Chunk& chunk, const TensorPlace& place,
                          const tensor::Box& box, const tensor::StridedView& memory, int device = staging::kHost);
  /// Adds bytes [begin, end) of a record. Those of one that the manifest itself holds are copied at once.
  /// \param memory  Has end - begin bytes.
  void add_bytes(const format::Record& record, int64_t begin, int64_t end, uint8_t* memory);
  /// Adds a whole record.
  void add_bytes(const format::Record& record, uint8_t* memory) { add_bytes(record, 0, record.bytes, memory); }

  /// What the first phase wants: `ReadSegment::wanted` holds positions in this list.
  const std::vector<planner::WantedBox>& wanted() const { return phases_.front().wanted; }
  /// Ends the first phase when all of it is scattered, so that the next one becomes the first. \returns false if there
  /// is none; then nothing is left.
  bool begin_next_phase();
  bool is_empty() const { return phases_.size() == 1 && phases_.front().wanted.empty(); }
  /// Whether several threads may call `check` and `scatter` at the same time, each with other bytes of the files: the
  /// first phase copies bytes as they are to memory of the host, and computes no checksum of an archive.
  bool is_plain() const;
  /// Returns where in its file the first byte that an entry of `wanted` wants is, and the position behind the last one.
  std::pair<int64_t, int64_t> range_in_file(uint32_t index) const {
    const int64_t begin = phases_.front().wanted[index].offset;
    return {begin, begin + phases_.front().destinations[index].runs.end()};
  }

  /// Compares bytes [0, bytes) of `segment` with the checksums of their blocks. Does nothing for a file without blocks.
  /// \returns kCorrupt.
  base::Status check(const uint8_t* slot, const planner::ReadSegment& segment, int64_t bytes,
                     const SourceFile& file) const;
  /// Copies bytes of `segment`, which were checked, to all memory that wants some of them. \returns kCorrupt if a
  /// record ends behind the records of the file. kDevice.
  base::Status scatter(const uint8_t* slot, const planner::ReadSegment& segment, int64_t bytes, const SourceFile& file);
  /// Compares the checksums of other writers' archives that were wanted whole. Call it when all of the phase is
  /// scattered. \returns kCorrupt.
  base::Status check_archives();

  /// Forgets all memory, so that nothing can write to it after its owner was told that the run has ended.
  void clear();

 private:
  /// The scales of a box, which come in the phase before its codes.
  struct Scales {
    int64_t bytes = 0;
    std::vector<uint8_t> memory;  // empty until the first of them come

    uint8_t* data() {
      memory.resize(static_cast<size_t>(bytes));
      return memory.data();
    }
  };
  /// What a destination has that belongs to a quantized tensor.
  struct Quantized {
    std::shared_ptr<Scales> scales;
    int64_t scales_offset = 0;                          // of scales: where they go in the memory of all
    int64_t record_offset = 0;                          // of codes: where the first one of the record is
    std::optional<staging::Dequantizer> dequantizer{};  // of codes
  };
  /// Memory of a device.
  struct OnDevice {
    int device;
    tensor::StridedView view;  // dims in the order of the file
  };
  struct Destination {
    tensor::BoxRuns runs;                // of codes: of their bytes, without memory
    uint8_t* memory = nullptr;           // null for codes and scales
    std::optional<uint32_t> data_crc{};  // the archive's, if all of it is wanted
    std::unique_ptr<Quantized> quantized{};
    std::unique_ptr<OnDevice> on_device{};  // then `memory` is null
  };
  /// A part of the data of one destination, and the CRC that was taken when it was scattered.
  struct Summed {
    uint32_t destination;
    int64_t begin, end;  // bytes of the chunk
    uint32_t crc;
  };
  struct Phase {
    std::vector<planner::WantedBox> wanted;
    std::vector<Destination> destinations;
    int64_t scale_bytes = 0;
  };

  /// Adds a box of plain elements, which are as `place` says.
  void add_plain(Phase* phase, const format::Chunk& chunk, const TensorPlace& place, const tensor::Box& box,
                 const tensor::Dims& memory_strides_bytes, Destination to);
  base::Status add_on_device(const std::string& fqn, const format::Chunk& chunk, const TensorPlace& place,
                             const tensor::Box& box, const tensor::StridedView& memory, int device);
  /// Adds a box of codes, and the scales that it needs. Cuts it if these are too many.
  void add_quantized(const format::Chunk& chunk, const TensorPlace& place, const tensor::Box& box,
                     const tensor::StridedView& memory);
  void add_scales(const TensorPlace& place, const tensor::Box& scale_box, const std::shared_ptr<Scales>& scales);

  /// Whether a device is given a box in few pieces: all of it lies together in the file, or its rows are long.
  static bool suits_devices(const TensorPlace& place, const tensor::BoxRuns& runs);
  base::Status scatter_all(const uint8_t* slot, const planner::ReadSegment& segment, int64_t bytes,
                           const SourceFile& file, bool* any_device);
  /// Adds to the next copies what `window`, bytes [begin, end) of the box's data, has for memory of a device.
  base::Status add_to_copies(const Destination& destination, const uint8_t* window, int64_t begin, int64_t end);

  const std::string directory_;
  const format::Manifest& manifest_;
  const bool verify_;
  std::deque<Phase> phases_{1};
  size_t scales_phase_ = 0;  // that reads the scales that are added next
  std::vector<Summed> summed_;
  staging::DeviceCopies* copies_ = nullptr;
  staging::ValueTables tables_;
};

}  // namespace bytecheckpoint::engine
