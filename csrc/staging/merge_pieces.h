// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <limits>
#include <vector>

#include "csrc/base/content_hash.h"
#include "csrc/tensor/strided_view.h"

namespace bytecheckpoint::staging {

/// A tensor, or a box of one, and where its row-major bytes are in merged memory.
struct Piece {
  tensor::StridedView view;
  int64_t offset = 0;  // position of its first byte in merged memory
  int64_t bytes = 0;
};

/// Bytes of a piece that have one CRC-32. The rest at its end has one, too.
inline constexpr int64_t kChecksumBytes = base::kHashedBytes;

/// The CRCs of merged pieces. Those of piece p are `crcs[first[p]]` up to, but not including, `crcs[first[p + 1]]`.
///
///     merged   |piece 0     |pad|piece 1                              |pad|piece 2|
///     CRCs     | crc 0      |   | crc 1: 1 MiB | crc 2: 1 MiB | crc 3 |   | crc 4 |      first = {0, 1, 4, 5}
struct PieceChecksums {
  std::vector<uint32_t> crcs;
  std::vector<size_t> first;
  bool has_hashes = false;                // says, before they are computed, whether to compute hashes, too
  std::vector<base::ContentHash> hashes;  // one for each CRC, or none
};

/// Where pieces may begin in merged memory.
struct PieceAlignment {
  int64_t bytes = 1;        // every piece begins at a multiple of this
  int64_t large_bytes = 1;  // large pieces begin at a multiple of this, too; at least `bytes`
  int64_t large_from = std::numeric_limits<int64_t>::max();  // bytes from which on a piece is large
};

/// Lays out `views` in merged memory, behind what is already there.
/// \param pieces       Receives one piece for each view.
/// \param total_bytes  Bytes of merged memory, before and after.
/// \returns false if that is more than an int64_t can count.
bool lay_out(std::vector<tensor::StridedView> views, PieceAlignment alignment, std::vector<Piece>* pieces,
             int64_t* total_bytes);

/// Copies all pieces to `merged`. Bytes between pieces are not changed. Works in `num_threads` threads, the caller's
/// among them, or fewer if the system has none.
/// \param checksums  Receives the CRCs, computed in the same pass, unless null.
void merge_pieces(const std::vector<Piece>& pieces, uint8_t* merged, int num_threads, PieceChecksums* checksums);

/// Computes the CRCs of pieces that are already in `merged`, as `merge_pieces` does. Does not read where the pieces
/// came from.
void checksum_pieces(const std::vector<Piece>& pieces, const uint8_t* merged, int num_threads,
                     PieceChecksums* checksums);

/// The reverse: copies from `merged` to all pieces. No memory may be in two pieces, nor in `merged`.
void scatter_pieces(const std::vector<Piece>& pieces, const uint8_t* merged, int num_threads);

}  // namespace bytecheckpoint::staging
