// SPDX-License-Identifier: Apache-2.0
#include "csrc/engine/load/archive_checksums.h"

#include <string>

#include "csrc/base/crc32.h"
#include "tests/cpp/expect.h"

namespace bytecheckpoint::engine {
namespace {

const std::string kData = "the elements of a tensor";
const auto* const kBytes = reinterpret_cast<const uint8_t*>(kData.data());
const auto kSize = static_cast<int64_t>(kData.size());

/// Two tensors of one file, each wanted whole.
LoadPhase phase_of_two() {
  LoadPhase phase;
  for (const int64_t offset : {100, 200}) {
    phase.wanted.push_back({0, offset, {kSize}, {1}, 1});
    Destination to;
    to.runs = tensor::BoxRuns::of_strides({kSize}, {1}, 1, {1});
    to.data_crc = base::crc32(0, kBytes, kData.size());
    phase.destinations.push_back(std::move(to));
  }
  return phase;
}

TEST_CASE("archive checksums: the parts of several tensors may come in any order") {
  ArchiveChecksums checksums;
  for (const int64_t begin : {12, 0, 20, 4}) {
    const int64_t end = begin == 0 ? 4 : begin == 4 ? 12 : begin == 12 ? 20 : kSize;
    for (const uint32_t destination : {1, 0}) checksums.add(destination, begin, end, kBytes + begin);
  }
  EXPECT_OK(checksums.check(phase_of_two(), {}, "/ckpt"));
}

TEST_CASE("archive checksums: a changed byte is told with file, offset and length") {
  format::Manifest manifest;
  manifest.files.resize(1);
  manifest.files[0].name = "a.distcp";
  std::string changed = kData;
  changed[3] = 'X';
  ArchiveChecksums checksums;
  checksums.add(0, 0, kSize, kBytes);
  checksums.add(1, 0, kSize, reinterpret_cast<const uint8_t*>(changed.data()));
  EXPECT_FAILURE(kCorrupt, "read(/ckpt/a.distcp, offset=200, 24 bytes): the data have CRC ",
                 checksums.check(phase_of_two(), manifest, "/ckpt"));
  checksums.clear();
  EXPECT_OK(checksums.check(phase_of_two(), manifest, "/ckpt"));
}

}  // namespace
}  // namespace bytecheckpoint::engine
