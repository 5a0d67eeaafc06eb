// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <vector>

#include "csrc/base/status.h"
#include "csrc/staging/device_piece.h"
#include "csrc/staging/element_layout.h"

namespace bytecheckpoint::staging {

/// A tensor that a kernel packs, or a part of one.
struct PackedPiece {
  ElementLayout layout;
  int64_t scratch_offset;  // where unit 0 would be; negative if earlier units are in an earlier batch
};

/// Bytes that are in the same order in scratch and in the host buffer, so that one DMA moves them.
struct PackedRange {
  int64_t scratch_offset;
  int64_t host_offset;
  int64_t bytes;
};

/// One batch: what goes through scratch together, and what is copied past it meanwhile.
struct PackBatch {
  std::vector<PackedPiece> pieces;
  std::vector<Tile> tiles;          // Tile::piece is a position in `pieces`
  std::vector<PackedRange> ranges;  // ascending in scratch and on the host
  bool has_gaps = false;            // some bytes in ranges belong to no piece
  int64_t scratch_bytes = 0;        // from 0 on; covers all ranges
  std::vector<size_t> direct;       // pieces of the call that are copied without a kernel
};

/// The limits within which a PackPlan makes batches.
struct PackLimits {
  int64_t scratch_bytes = 0;     // of a batch; 0: no kernel is used. Otherwise at least kMinScratchBytes.
  int64_t max_pieces = 0;        // most pieces of a batch, at least 1
  int64_t max_packed_bytes = 0;  // larger contiguous pieces go without a kernel
  int64_t max_gap_bytes = 0;     // largest gap between pieces of one range

  static constexpr int64_t kMinScratchBytes = 1024;
  /// The most tiles that a batch can have.
  int64_t max_tiles() const { return scratch_bytes / kTileBytes + max_pieces; }
};

/// Checks that `pieces` ascend by host offset without overlap, and that each is a tensor that can be copied.
/// \returns kInvalidArgument, with the position of the piece, if not.
base::Status check_pieces(const std::vector<DevicePiece>& pieces);

/// Divides pieces into batches, in order. Later batches are planned while earlier ones are under way.
///
/// A batch takes what fits into scratch, so a large piece may be divided among several. Small gaps between pieces (the
/// caller's headers and padding) are moved along, if that costs less than another DMA:
///
///     host      |hdr|piece 0|hdr|piece 1|        ... large, contiguous ...       |hdr|piece 3|
///     scratch       |piece 0|gap|piece 1|   |piece 3|                  one batch
///     ranges        [   one DMA         ]   [one DMA]    and one for the large piece, past scratch
class PackPlan {
 public:
  /// \param pieces  Have passed `check_pieces`, and must outlive this.
  PackPlan(const std::vector<DevicePiece>& pieces, const PackLimits& limits) : pieces_(pieces), limits_(limits) {}

  /// Plans the next batch. Reuses the vectors of `batch`. \returns false if all pieces are in earlier batches.
  bool next(PackBatch* batch);

 private:
  bool goes_direct(const ElementLayout& layout) const;
  /// Adds units of the current piece to the batch, as many as fit. \returns false if none fits.
  bool take_units(PackBatch* batch, bool may_join);

  const std::vector<DevicePiece>& pieces_;
  const PackLimits limits_;
  size_t next_piece_ = 0;
  // The piece that is being divided: its layout, and its first unit that is in no batch yet.
  ElementLayout layout_ = {};
  int64_t next_unit_ = 0;
};

}  // namespace bytecheckpoint::staging
