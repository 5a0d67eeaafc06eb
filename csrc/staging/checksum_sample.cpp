// SPDX-License-Identifier: Apache-2.0
#include "csrc/staging/checksum_sample.h"

#include <algorithm>
#include <vector>

#include "csrc/base/crc32.h"
#include "csrc/staging/merge.h"
#include "csrc/staging/staged_bytes.h"

namespace bytecheckpoint::staging {

ChecksumSample sample_checksum(const tensor::StridedView& view, uint64_t drawing) {
  const int64_t item_bytes = tensor::find_dtype(view.dtype)->itemsize_bytes;
  int64_t bytes = item_bytes;
  for (const int64_t size : view.sizes) bytes *= size;
  if (bytes == 0) return {true, 0};
  const bool is_row_major = tensor::is_row_major(view);
  if (is_row_major) {
    const std::optional<uint32_t> staged = find_staged(view).crc;
    if (staged.has_value()) return {true, *staged};
  }
  const auto num_blocks = static_cast<uint64_t>((bytes + kSampleBytes - 1) / kSampleBytes);
  const int64_t begin = static_cast<int64_t>(drawing % num_blocks) * kSampleBytes;
  const auto size = static_cast<size_t>(std::min(kSampleBytes, bytes - begin));
  if (is_row_major) return {num_blocks == 1, base::crc32(0, view.data + begin, size)};
  std::vector<uint8_t> window(size);
  gather_window(tensor::BoxRuns(view), view.data, begin, begin + static_cast<int64_t>(size), window.data());
  return {num_blocks == 1, base::crc32(0, window.data(), size)};
}

}  // namespace bytecheckpoint::staging
