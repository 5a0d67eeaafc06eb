// SPDX-License-Identifier: Apache-2.0
#include "csrc/staging/merge_pieces.h"

#include <algorithm>
#include <atomic>
#include <optional>

#include "csrc/base/bytes.h"
#include "csrc/base/crc32.h"
#include "csrc/base/named_thread.h"
#include "csrc/staging/merge.h"
#include "csrc/staging/stream_copy.h"

namespace bytecheckpoint::staging {
namespace {

/// Summed, then copied, in parts of this size: the copy finds a part in the first-level cache, and meanwhile fetches
/// the next one to it. So memory is never only read or only written.
constexpr int64_t kCachedBytes = 2 << 10;
/// The same of strided pieces, where each part costs a search for its first run.
constexpr int64_t kGatheredBytes = 8 << 10;
/// What a thread takes at a time. For less, another thread is not worth its start.
constexpr int64_t kGrainBytes = 1 << 20;

/// A stretch of one piece that has a CRC of its own.
struct Stretch {
  uint32_t piece;
  int64_t begin;  // bytes of the piece
  int64_t end;
};

/// All stretches of all pieces, and where the next portion of them for a thread begins.
struct Work {
  explicit Work(const std::vector<Piece>& pieces, PieceChecksums* checksums) {
    int64_t grain = 0;
    for (size_t p = 0; p < pieces.size(); ++p) {
      if (checksums != nullptr) checksums->first.push_back(stretches.size());
      for (int64_t begin = 0; begin < pieces[p].bytes; begin += kChecksumBytes) {
        if (grain == 0) grains.push_back(stretches.size());
        const int64_t end = std::min(begin + kChecksumBytes, pieces[p].bytes);
        stretches.push_back({static_cast<uint32_t>(p), begin, end});
        grain += end - begin;
        if (grain >= kGrainBytes) grain = 0;
      }
    }
    if (checksums != nullptr) {
      checksums->first.push_back(stretches.size());
      checksums->crcs.resize(stretches.size());
      if (checksums->has_hashes) checksums->hashes.resize(stretches.size());
    }
    num_grains = grains.size();
    grains.push_back(stretches.size());
  }

  std::vector<Stretch> stretches;
  std::vector<size_t> grains;
  size_t num_grains;
};

/// Calls `handle(number of the stretch, stretch, runs of its piece)` for every stretch, in `num_threads` threads. A
/// thread goes through neighbouring ones in their order.
template <class Handle>
void for_each_stretch(const std::vector<Piece>& pieces, const Work& work, int num_threads, const Handle& handle) {
  std::atomic<size_t> next{0};
  const auto run = [&] {
    std::optional<tensor::BoxRuns> runs;
    uint32_t of_piece = 0;
    for (size_t grain = next++; grain < work.num_grains; grain = next++) {
      for (size_t s = work.grains[grain]; s < work.grains[grain + 1]; ++s) {
        const Stretch& stretch = work.stretches[s];
        if (!runs.has_value() || of_piece != stretch.piece) {
          of_piece = stretch.piece;
          runs.emplace(pieces[of_piece].view);
        }
        handle(s, stretch, *runs);
      }
    }
    end_stream_copies();
  };
  base::work_together("bcp-merge", std::min(static_cast<size_t>(std::max(num_threads, 1)), work.num_grains), run);
}

bool is_contiguous(const tensor::BoxRuns& runs) {
  return runs.num_runs() == 1 && runs.memory_step_bytes() == runs.itemsize_bytes();
}

int64_t part_bytes(const tensor::BoxRuns& runs) {
  return is_contiguous(runs) ? kCachedBytes : kGatheredBytes;
}

/// What is computed of a stretch.
struct Sums {
  uint32_t crc = 0;
  base::ContentHash hash;
};

/// \param next  What is merged after the stretch.
uint32_t merge_stretch(const Piece& piece, const tensor::BoxRuns& runs, const Stretch& stretch, const uint8_t* next,
                       uint8_t* merged, bool has_checksum) {
  uint32_t crc = 0;
  uint8_t* const to = merged + piece.offset;
  const int64_t part = part_bytes(runs);
  for (int64_t begin = stretch.begin; begin < stretch.end; begin += part) {
    const int64_t end = std::min(begin + part, stretch.end);
    if (is_contiguous(runs)) {
      const uint8_t* const from = piece.view.data + begin;
      if (has_checksum) crc = base::crc32(crc, from, static_cast<size_t>(end - begin));
      const bool is_last = end == stretch.end;
      stream_copy(to + begin, from, end - begin, is_last ? next : piece.view.data + end,
                  is_last ? kCachedBytes : stretch.end - end);
    } else {
      gather_window(runs, piece.view.data, begin, end, to + begin);
      if (has_checksum) crc = base::crc32(crc, to + begin, static_cast<size_t>(end - begin));
    }
  }
  return crc;
}

/// The same with a hash. Somebody may change the memory meanwhile, and CRC, hash and copy must fit one another: so all
/// three are made of a few bytes that were put aside.
Sums merge_and_hash_stretch(const Piece& piece, const tensor::BoxRuns& runs, const Stretch& stretch,
                            const uint8_t* next, uint8_t* merged, base::ContentHasher* hasher) {
  alignas(64) uint8_t aside[std::max(kCachedBytes, kGatheredBytes)];
  Sums sums;
  const int64_t part = part_bytes(runs);
  for (int64_t begin = stretch.begin; begin < stretch.end; begin += part) {
    const int64_t end = std::min(begin + part, stretch.end);
    const auto size = static_cast<size_t>(end - begin);
    gather_window(runs, piece.view.data, begin, end, aside);
    sums.crc = base::crc32(sums.crc, aside, size);
    hasher->add(aside, size);
    const bool is_last = end == stretch.end || !is_contiguous(runs);
    stream_copy(merged + piece.offset + begin, aside, end - begin, is_last ? next : piece.view.data + end,
                is_last ? kCachedBytes : stretch.end - end);
  }
  sums.hash = hasher->end();
  return sums;
}

}  // namespace

bool lay_out(std::vector<tensor::StridedView> views, PieceAlignment alignment, std::vector<Piece>* pieces,
             int64_t* total_bytes) {
  int64_t end = *total_bytes;
  pieces->reserve(pieces->size() + views.size());
  for (tensor::StridedView& view : views) {
    Piece piece;
    int64_t numel = 0, padded = 0;
    if (!tensor::checked_numel(view.sizes, &numel) ||
        !base::checked_mul(numel, tensor::find_dtype(view.dtype)->itemsize_bytes, &piece.bytes)) {
      return false;
    }
    const int64_t step = piece.bytes >= alignment.large_from ? alignment.large_bytes : alignment.bytes;
    if (!base::checked_add(end, step - 1, &padded)) return false;
    piece.offset = padded - padded % step;
    if (!base::checked_add(piece.offset, piece.bytes, &end)) return false;
    piece.view = std::move(view);
    pieces->push_back(std::move(piece));
  }
  *total_bytes = end;
  return true;
}

void merge_pieces(const std::vector<Piece>& pieces, uint8_t* merged, int num_threads, PieceChecksums* checksums) {
  const Work work(pieces, checksums);
  for_each_stretch(pieces, work, num_threads, [&](size_t s, const Stretch& stretch, const tensor::BoxRuns& runs) {
    const Stretch& following = work.stretches[std::min(s + 1, work.stretches.size() - 1)];
    const uint8_t* const next = pieces[following.piece].view.data + following.begin;
    if (checksums != nullptr && checksums->has_hashes) {
      base::ContentHasher hasher;
      const Sums sums = merge_and_hash_stretch(pieces[stretch.piece], runs, stretch, next, merged, &hasher);
      checksums->crcs[s] = sums.crc;
      checksums->hashes[s] = sums.hash;
      return;
    }
    const uint32_t crc = merge_stretch(pieces[stretch.piece], runs, stretch, next, merged, checksums != nullptr);
    if (checksums != nullptr) checksums->crcs[s] = crc;
  });
}

void checksum_pieces(const std::vector<Piece>& pieces, const uint8_t* merged, int num_threads,
                     PieceChecksums* checksums) {
  const Work work(pieces, checksums);
  for_each_stretch(pieces, work, num_threads, [&](size_t s, const Stretch& stretch, const tensor::BoxRuns&) {
    const uint8_t* const first = merged + pieces[stretch.piece].offset;
    const auto size = static_cast<size_t>(stretch.end - stretch.begin);
    checksums->crcs[s] = base::crc32(0, first + stretch.begin, size);
    if (checksums->has_hashes) checksums->hashes[s] = base::hash_stretch(first + stretch.begin, size);
  });
}

void scatter_pieces(const std::vector<Piece>& pieces, const uint8_t* merged, int num_threads) {
  const Work work(pieces, nullptr);
  for_each_stretch(pieces, work, num_threads, [&](size_t, const Stretch& stretch, const tensor::BoxRuns& runs) {
    const Piece& piece = pieces[stretch.piece];
    scatter_window(runs, merged + piece.offset + stretch.begin, stretch.begin, stretch.end, piece.view.data);
  });
}

}  // namespace bytecheckpoint::staging
