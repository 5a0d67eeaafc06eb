// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <vector>

#include "csrc/tensor/strided_view.h"

namespace bytecheckpoint::staging {

/// A tensor, or a box of one, and where its row-major bytes lie in merged memory.
struct Piece {
  tensor::StridedView view;
  int64_t offset = 0;  // of its first byte in merged memory
  int64_t bytes = 0;
};

/// One CRC-32 is taken of each stretch of so many bytes of a piece, and one of what is left.
inline constexpr int64_t kSummedBytes = 1 << 20;

/// CRCs of merged pieces: of piece p those from `first[p]` up to `first[p + 1]`.
struct PieceSums {
  std::vector<uint32_t> crcs;
  std::vector<size_t> first;
};

/// Puts `views` one behind the other into merged memory, behind what is there, each at a multiple of `alignment_bytes`.
/// \param total_bytes  Bytes of merged memory, before and after.
/// \returns false if they are more than an int64_t counts.
bool lay_out(std::vector<tensor::StridedView> views, int64_t alignment_bytes, std::vector<Piece>* pieces,
             int64_t* total_bytes);

/// Copies all pieces to `merged`; bytes between pieces are left alone. By `num_threads` threads, the caller among them,
/// or fewer where the system gives none.
/// \param sums  Receives CRCs, taken in the same pass, unless null.
void merge_pieces(const std::vector<Piece>& pieces, uint8_t* merged, int num_threads, PieceSums* sums);

/// CRCs of pieces that are merged already, as `merge_pieces` takes them; where the pieces came from is not looked at.
void sum_pieces(const std::vector<Piece>& pieces, const uint8_t* merged, int num_threads, PieceSums* sums);

/// The reverse. No memory may be in two pieces, nor in `merged`.
void scatter_pieces(const std::vector<Piece>& pieces, const uint8_t* merged, int num_threads);

}  // namespace bytecheckpoint::staging
