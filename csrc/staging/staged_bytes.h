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

/// Where the pieces of a state were merged to, and their CRCs. Whoever copies them further can tell whether the memory
/// has changed since.
struct StagedBytes {
  const uint8_t* first = nullptr;
  std::vector<int64_t> offsets;  // of the pieces, from `first`; ascending
  std::vector<int64_t> bytes;    // of the pieces
  PieceChecksums checksums;

  /// Describes `pieces` that were merged to `merged`, with CRCs from `merge_pieces` or `checksum_pieces`.
  static StagedBytes of(const uint8_t* merged, const std::vector<Piece>& pieces, const PieceChecksums& checksums);
  /// Adds more pieces, which must be behind those that are there.
  void add(const std::vector<Piece>& pieces, const PieceChecksums& more);
};

/// Encodes offsets, sizes, CRCs and hashes for another process that maps the same memory.
std::string encode_staged(const StagedBytes& staged);
/// \param merged, num_bytes  Where the memory is mapped in this process.
/// \returns kInvalidArgument for a damaged table, or a piece outside the memory.
base::Result<StagedBytes> decode_staged(std::string_view bytes, const uint8_t* merged, int64_t num_bytes);

/// Makes `staged` known to `find_staged` for as long as the caller keeps it. Thread-safe.
void list_staged(const std::shared_ptr<const StagedBytes>& staged);

/// What is known about the memory of a tensor.
struct KnownBytes {
  std::optional<uint32_t> crc;            // of its row-major elements, if it is one whole piece: the caller compares
  std::optional<base::ContentHash> hash;  // of the same, if hashes were computed
  base::Status status;                    // otherwise: kCorrupt if one of its stretches has changed
};

/// Returns what is known about the memory of a view without negative strides: ok and no CRC if nobody has listed it.
/// For a part of a piece it computes the CRCs of the stretches that the part touches. Thread-safe.
KnownBytes find_staged(const tensor::StridedView& view);

/// Returns the error for memory whose CRC has changed: kCorrupt.
base::Status changed_since_staged(uint32_t expected_crc, uint32_t crc);

}  // namespace bytecheckpoint::staging
