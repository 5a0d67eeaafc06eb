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
  int64_t scratch_offset;  // of unit 0; negative if earlier units went with an earlier batch
};

/// Bytes that lie in scratch as they do in the host buffer, so that one DMA moves them.
struct PackedRange {
  int64_t scratch_offset;
  int64_t host_offset;
  int64_t bytes;
};

/// What goes through scratch at a time, and what goes past it meanwhile.
struct PackBatch {
  std::vector<PackedPiece> pieces;
  std::vector<Tile> tiles;          // Tile::piece counts in `pieces`
  std::vector<PackedRange> ranges;  // ascending in scratch and on the host
  bool has_gaps = false;            // ranges have bytes that are of no piece
  int64_t scratch_bytes = 0;        // from 0 on; covers all ranges
  std::vector<size_t> direct;       // pieces of the call that are copied without a kernel
};

struct PackLimits {
  int64_t scratch_bytes = 0;     // of a batch; 0: all goes without a kernel. Else at least kMinScratchBytes.
  int64_t max_pieces = 0;        // of a batch, at least 1
  int64_t max_packed_bytes = 0;  // contiguous pieces above this go without a kernel
  int64_t max_gap_bytes = 0;     // between pieces of one range

  static constexpr int64_t kMinScratchBytes = 1024;
  /// Tiles of a batch are no more than this.
  int64_t max_tiles() const { return scratch_bytes / kTileBytes + max_pieces; }
};

/// Are `pieces` in order and apart, and is each a tensor that can be copied?
/// \returns kInvalidArgument, with the number of the piece, if not.
base::Status check_pieces(const std::vector<DevicePiece>& pieces);

/// Divides pieces into batches, in order, while earlier batches are already under way.
///
/// A batch takes what fits: a piece may be divided among several. Gaps between pieces, which are headers and padding of
/// the caller's, are moved along where that costs less than another DMA.
class PackPlan {
 public:
  /// \param pieces  Passed `check_pieces`; outlive this.
  PackPlan(const std::vector<DevicePiece>& pieces, const PackLimits& limits) : pieces_(pieces), limits_(limits) {}

  /// The next batch, in the vectors of an earlier one; false if all pieces are in batches.
  bool next(PackBatch* batch);

 private:
  bool goes_direct(const ElementLayout& layout) const;
  /// Units of the piece at hand, as many as fit, behind what the batch has; false if none does.
  bool take_units(PackBatch* batch, bool may_join);

  const std::vector<DevicePiece>& pieces_;
  const PackLimits limits_;
  size_t next_piece_ = 0;
  // The piece that is being divided: its layout, and its first unit that is in no batch.
  ElementLayout layout_ = {};
  int64_t next_unit_ = 0;
};

}  // namespace bytecheckpoint::staging
