// SPDX-License-Identifier: Apache-2.0
#include "csrc/engine/load/archive_checksums.h"

#include <algorithm>

#include "csrc/base/crc32.h"
#include "csrc/io/directory.h"

namespace bytecheckpoint::engine {

using base::Code;
using base::Status;
using base::text;

void ArchiveChecksums::add(uint32_t destination, int64_t begin, int64_t end, const uint8_t* bytes) {
  parts_.push_back({destination, begin, end, base::crc32(0, bytes, static_cast<size_t>(end - begin))});
}

Status ArchiveChecksums::check(const LoadPhase& phase, const format::Manifest& manifest, const std::string& directory) {
  std::sort(parts_.begin(), parts_.end(), [](const Part& a, const Part& b) {
    return a.destination != b.destination ? a.destination < b.destination : a.begin < b.begin;
  });
  for (size_t i = 0; i < parts_.size();) {
    const uint32_t index = parts_[i].destination;
    uint32_t crc = 0;
    for (; i < parts_.size() && parts_[i].destination == index; ++i) {
      crc = base::crc32_combine(crc, parts_[i].crc, static_cast<uint64_t>(parts_[i].end - parts_[i].begin));
    }
    if (crc == *phase.destinations[index].data_crc) continue;
    const std::string path = io::join(directory, manifest.files[phase.wanted[index].file].name);
    return Status::make(
        Code::kCorrupt,
        text("read(", path, ", offset=", phase.wanted[index].offset, ", ", phase.destinations[index].runs.end(),
             " bytes): the data have CRC ", crc, ", but the archive says ", *phase.destinations[index].data_crc,
             "; if it was written with torch.serialization.set_crc32_options(False), load with "
             "Config(verify=False)"),
        path);
  }
  return Status::ok();
}

}  // namespace bytecheckpoint::engine
