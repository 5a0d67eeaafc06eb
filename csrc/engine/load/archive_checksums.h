// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "csrc/base/status.h"
#include "csrc/engine/load/load_phases.h"
#include "csrc/format/manifest/manifest.h"

namespace bytecheckpoint::engine {

/// The checksums of other writers' archives that are read whole, computed as their bytes come, in any order. Files of
/// ours need none: their blocks have checksums. Not thread-safe.
class ArchiveChecksums {
 public:
  /// Adds bytes [begin, end) of the data that `destination`, a position in the phase, wants.
  void add(uint32_t destination, int64_t begin, int64_t end, const uint8_t* bytes);
  /// Compares the checksums when all bytes were added. \returns kCorrupt.
  /// \param manifest  Of the checkpoint in `directory`.
  base::Status check(const LoadPhase& phase, const format::Manifest& manifest, const std::string& directory);
  void clear() { parts_.clear(); }

 private:
  /// A part of the data of one destination.
  struct Part {
    uint32_t destination;
    int64_t begin, end;  // bytes of the chunk
    uint32_t crc;
  };
  std::vector<Part> parts_;
};

}  // namespace bytecheckpoint::engine
