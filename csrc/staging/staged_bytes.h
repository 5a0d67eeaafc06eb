// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "csrc/base/status.h"
#include "csrc/staging/merge_pieces.h"

namespace bytecheckpoint::staging {

/// Where pieces were merged to, and their CRCs: whoever copies them on sees whether memory has changed meanwhile.
struct StagedBytes {
  const uint8_t* first = nullptr;
  std::vector<int64_t> offsets;  // of the pieces, ascending
  std::vector<int64_t> bytes;    // of the pieces
  PieceSums sums;

  static StagedBytes of(const uint8_t* merged, const std::vector<Piece>& pieces, const PieceSums& sums);
  /// More pieces, behind those that are there.
  void add(const std::vector<Piece>& pieces, const PieceSums& more);
};

/// For another process that maps the same memory.
std::string encode_staged(const StagedBytes& staged);
/// \param merged, num_bytes  Where the memory is mapped here; a piece beyond it is kInvalidArgument.
base::Result<StagedBytes> decode_staged(std::string_view bytes, const uint8_t* merged, int64_t num_bytes);

/// Lets `find_staged` know of `staged` as long as the caller keeps it.
void list_staged(const std::shared_ptr<const StagedBytes>& staged);

/// What is known of the memory of a tensor.
struct KnownBytes {
  std::optional<uint32_t> crc;  // of its elements, row-major, if it is one whole piece: the caller compares
  base::Status status;          // of anything else: kCorrupt if a stretch that it has bytes in has changed
};

/// Of a view without negative strides; ok and no CRC for memory that nobody has listed.
KnownBytes find_staged(const tensor::StridedView& view);

/// What has happened to memory of which a CRC is not what it was.
base::Status changed_since_staged(uint32_t expected_crc, uint32_t crc);

}  // namespace bytecheckpoint::staging
