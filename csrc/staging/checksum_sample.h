// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>

#include "csrc/tensor/strided_view.h"

namespace bytecheckpoint::staging {

/// Of a longer tensor, so many bytes are looked at.
inline constexpr int64_t kSampleBytes = 256 << 10;

/// The CRC-32 of a tensor, or of one block of it.
struct ChecksumSample {
  bool is_whole = false;
  uint32_t crc = 0;
};

/// Returns the checksum of the row-major elements of a tensor, for the comparison with copies of other processes. If
/// somebody has staged the tensor (`find_staged`), the checksum of all of it is known. Otherwise that of a tensor of up
/// to kSampleBytes is computed, and of a larger one that of a block of as many bytes.
///
/// \param view     No stride may be negative.
/// \param drawing  Says which block: the same number gives the same block of tensors of equal size. Thread-safe.
ChecksumSample sample_checksum(const tensor::StridedView& view, uint64_t drawing);

}  // namespace bytecheckpoint::staging
