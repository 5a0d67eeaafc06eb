// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>

#include "csrc/base/status.h"
#include "csrc/engine/load/load_phases.h"
#include "csrc/engine/load/stored_checksums.h"
#include "csrc/engine/open/source_file.h"
#include "csrc/planner/load_plan.h"
#include "csrc/staging/dequantize.h"
#include "csrc/staging/device_copies.h"

namespace bytecheckpoint::engine {

/// Copies bytes of files from a slot to all memory that wants some of them: of the host, of devices, and codes of
/// quantized tensors as the values that they stand for.
///
/// Not thread-safe, unless the phase has memory of the host alone, and nothing that is quantized.
class Scatter {
 public:
  /// Makes the memory of devices known. \param copies  Must outlive this.
  void set_copies(staging::DeviceCopies* copies) { copies_ = copies; }

  /// Copies bytes [0, bytes) of `segment`, which are in `slot`.
  /// \param checksums  Receives what is read of archives that have checksums; null: they are not compared.
  /// \returns kCorrupt if a record ends behind the records of the file. kDevice.
  base::Status run(LoadPhase* phase, const uint8_t* slot, const planner::ReadSegment& segment, int64_t bytes,
                   const SourceFile& file, StoredChecksums* checksums);
  /// Forgets all memory of devices.
  void clear();

 private:
  base::Status copy_all(LoadPhase* phase, const uint8_t* slot, const planner::ReadSegment& segment, int64_t bytes,
                        const SourceFile& file, StoredChecksums* checksums, bool* any_device);
  /// Adds to the next copies what `window`, bytes [begin, end) of the box's data, has for memory of a device.
  base::Status add_to_copies(const Destination& destination, const uint8_t* window, int64_t begin, int64_t end);

  staging::DeviceCopies* copies_ = nullptr;
  staging::ValueTables tables_;
};

}  // namespace bytecheckpoint::engine
