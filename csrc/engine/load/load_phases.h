// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <deque>
#include <memory>
#include <optional>
#include <vector>

#include "csrc/engine/load/tensor_place.h"
#include "csrc/format/manifest/manifest.h"
#include "csrc/planner/load_plan.h"
#include "csrc/staging/dequantize.h"
#include "csrc/tensor/box.h"
#include "csrc/tensor/strided_view.h"

namespace bytecheckpoint::engine {

/// The scales of a box, which come in the phase before its codes.
struct Scales {
  int64_t bytes = 0;
  std::vector<uint8_t> memory;  // empty until the first of them come

  uint8_t* data() {
    memory.resize(static_cast<size_t>(bytes));
    return memory.data();
  }
};

/// Where the bytes of one wanted box go.
struct Destination {
  /// What belongs to a quantized tensor.
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

  tensor::BoxRuns runs;                        // of codes: of their bytes, without memory
  uint8_t* memory = nullptr;                   // null for codes and scales
  std::optional<format::StoredCrc> stretch{};  // which has a checksum, and is followed
  std::unique_ptr<Quantized> quantized{};
  std::unique_ptr<OnDevice> on_device{};  // then `memory` is null
};

/// What is read before anything of the next phase.
struct LoadPhase {
  std::vector<planner::WantedBox> wanted;
  std::vector<Destination> destinations;  // one for each of `wanted`
  int64_t scale_bytes = 0;
};

/// Sorts what a load reads into phases. Values that are dequantized need their scales first: each phase reads the codes
/// whose scales the phase before has read, and the scales of the next phase, up to `kMostScaleBytes` of them.
///
///     phase 0   all other tensors and bytes, scales of a
///     phase 1   codes of a, scales of b
///     phase 2   codes of b
///
/// In what is added, a box is a part of its chunk, with offsets that count from the chunk's first element, and memory
/// is as large as the box, of the dtype of `place`. Not thread-safe.
class LoadPhases {
 public:
  /// The most bytes of scales that a phase reads. A box that needs more is cut, as long as it can be.
  static constexpr int64_t kMostScaleBytes = 16 << 20;

  /// Follows the checksums of what is added, also where only a part is wanted of what has one.
  void follow_parts() { follows_parts_ = true; }

  /// There is always a first phase, which may be empty.
  LoadPhase& first() { return phases_.front(); }
  const LoadPhase& first() const { return phases_.front(); }
  bool is_empty() const { return phases_.size() == 1 && phases_.front().wanted.empty(); }

  /// Adds a box of elements that are as `place` says.
  void add_plain(const format::Chunk& chunk, const TensorPlace& place, const tensor::Box& box,
                 const tensor::StridedView& memory);
  /// The same for memory of a device. \returns false, and adds nothing, if a device would be given the box in many
  /// pieces: neither does all of it lie together in the file, nor are its rows long.
  bool add_on_device(const format::Chunk& chunk, const TensorPlace& place, const tensor::Box& box,
                     const tensor::StridedView& memory, int device);
  /// Adds a box of codes, and the scales that it needs. Cuts it if these are too many.
  void add_quantized(const format::Chunk& chunk, const TensorPlace& place, const tensor::Box& box,
                     const tensor::StridedView& memory);
  /// Adds bytes [begin, end) of a record.
  void add_bytes(const format::Record& record, int64_t begin, int64_t end, uint8_t* memory);

  /// Ends the first phase, so that the next one becomes the first. \returns false if there is none; then nothing is
  /// left.
  bool begin_next();
  /// Forgets all memory.
  void clear();

 private:
  /// Adds a box to a phase, and the runs of it to `to`, which has the memory or the scales.
  void add_to(LoadPhase* phase, const format::Chunk& chunk, const TensorPlace& place, const tensor::Box& box,
              const tensor::Dims& memory_strides_bytes, Destination to);
  void add_scales(const TensorPlace& place, const tensor::Box& scale_box, const std::shared_ptr<Scales>& scales);

  /// Returns what to follow for a box of a chunk.
  std::optional<format::StoredCrc> stretch_of(const format::Chunk& chunk, const TensorPlace& place,
                                              const tensor::Box& box) const;

  bool follows_parts_ = false;
  std::deque<LoadPhase> phases_{1};
  size_t scales_phase_ = 0;  // that reads the scales that are added next
};

}  // namespace bytecheckpoint::engine
