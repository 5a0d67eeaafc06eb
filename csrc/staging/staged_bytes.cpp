// SPDX-License-Identifier: Apache-2.0
#include "csrc/staging/staged_bytes.h"

#include <algorithm>
#include <atomic>

#include "csrc/base/bytes.h"
#include "csrc/base/crc32.h"
#include "csrc/base/mutex.h"
#include "csrc/base/per_process.h"

namespace bytecheckpoint::staging {
namespace {

/// All StagedBytes that are listed in this process.
struct ListedStates {
  base::Mutex mutex;
  std::vector<std::weak_ptr<const StagedBytes>> listed BCP_GUARDED_BY(mutex);
  std::atomic<size_t> count{0};  // processes that stage nothing then need no lock
};

/// Returns the piece that holds byte `at` of the memory; nothing if none does.
std::optional<size_t> piece_at(const StagedBytes& staged, int64_t at) {
  const auto behind = std::upper_bound(staged.offsets.begin(), staged.offsets.end(), at);
  // Empty pieces may have the same offset as the one that has bytes there, which is the wanted one.
  for (auto p = static_cast<size_t>(behind - staged.offsets.begin()); p-- > 0;) {
    if (at < staged.offsets[p] + staged.bytes[p]) return p;
    if (staged.bytes[p] != 0) break;
  }
  return std::nullopt;
}

uint32_t crc_of_piece(const StagedBytes& staged, size_t piece) {
  uint32_t crc = 0;
  int64_t begin = 0;
  for (size_t s = staged.checksums.first[piece]; s < staged.checksums.first[piece + 1]; ++s, begin += kChecksumBytes) {
    const int64_t size = std::min(kChecksumBytes, staged.bytes[piece] - begin);
    crc = begin == 0 ? staged.checksums.crcs[s]
                     : base::crc32_combine(crc, staged.checksums.crcs[s], static_cast<uint64_t>(size));
  }
  return crc;
}

std::optional<base::ContentHash> hash_of_piece(const StagedBytes& staged, size_t piece) {
  const PieceChecksums& checksums = staged.checksums;
  if (!checksums.has_hashes || !base::has_content_hash()) return std::nullopt;
  const size_t first = checksums.first[piece];
  return base::join_stretches(checksums.hashes.data() + first, checksums.first[piece + 1] - first);
}

/// Compares the CRC of every stretch of the piece that has bytes in [begin, end) of it.
base::Status check_stretches(const StagedBytes& staged, size_t piece, int64_t begin, int64_t end) {
  for (int64_t s = begin / kChecksumBytes; s * kChecksumBytes < end; ++s) {
    const int64_t from = s * kChecksumBytes;
    const int64_t size = std::min(kChecksumBytes, staged.bytes[piece] - from);
    const uint32_t crc = base::crc32(0, staged.first + staged.offsets[piece] + from, static_cast<size_t>(size));
    const uint32_t expected = staged.checksums.crcs[staged.checksums.first[piece] + static_cast<size_t>(s)];
    if (crc != expected) return changed_since_staged(expected, crc);
  }
  return base::Status::ok();
}

KnownBytes look_in(const StagedBytes& staged, int64_t begin, int64_t bytes, bool in_order) {
  const std::optional<size_t> piece = piece_at(staged, begin);
  if (!piece.has_value()) return {};
  const int64_t in_piece = begin - staged.offsets[*piece];
  if (in_order && bytes == staged.bytes[*piece]) {
    return {crc_of_piece(staged, *piece), hash_of_piece(staged, *piece), base::Status::ok()};
  }
  const int64_t end = std::min(in_piece + bytes, staged.bytes[*piece]);
  return {std::nullopt, std::nullopt, check_stretches(staged, *piece, in_piece, end)};
}

}  // namespace

StagedBytes StagedBytes::of(const uint8_t* merged, const std::vector<Piece>& pieces, const PieceChecksums& checksums) {
  StagedBytes staged;
  staged.first = merged;
  staged.add(pieces, checksums);
  return staged;
}

void StagedBytes::add(const std::vector<Piece>& pieces, const PieceChecksums& more) {
  for (const Piece& piece : pieces) {
    offsets.push_back(piece.offset);
    bytes.push_back(piece.bytes);
  }
  const size_t before = checksums.crcs.size();
  if (!checksums.first.empty()) checksums.first.pop_back();  // the end of the last piece is the begin of the next one
  for (const size_t first : more.first) checksums.first.push_back(before + first);
  checksums.crcs.insert(checksums.crcs.end(), more.crcs.begin(), more.crcs.end());
  checksums.has_hashes = more.has_hashes;
  checksums.hashes.insert(checksums.hashes.end(), more.hashes.begin(), more.hashes.end());
}

std::string encode_staged(const StagedBytes& staged) {
  base::ByteWriter out;
  out.u64(staged.offsets.size());
  for (size_t p = 0; p < staged.offsets.size(); ++p) {
    out.i64(staged.offsets[p]);
    out.i64(staged.bytes[p]);
  }
  for (const uint32_t crc : staged.checksums.crcs) out.u32(crc);
  for (const base::ContentHash& hash : staged.checksums.hashes) {
    out.u64(hash.low);
    out.u64(hash.high);
  }
  return out.take();
}

base::Result<StagedBytes> decode_staged(std::string_view bytes, const uint8_t* merged, int64_t num_bytes) {
  const auto damaged = [] {
    return base::Status::make(base::Code::kInvalidArgument, "staged state: its table is damaged");
  };
  base::ByteReader in(bytes);
  const uint64_t num_pieces = in.u64();
  if (!in.ok() || num_pieces > in.remaining() / (2 * sizeof(int64_t))) return damaged();
  StagedBytes staged;
  staged.first = merged;
  size_t num_crcs = 0;
  for (uint64_t p = 0; p < num_pieces; ++p) {
    const int64_t offset = in.i64(), size = in.i64();
    const int64_t least = p == 0 ? 0 : staged.offsets.back() + staged.bytes.back();
    if (size < 0 || size > num_bytes || offset < least || offset > num_bytes - size) return damaged();
    staged.offsets.push_back(offset);
    staged.bytes.push_back(size);
    staged.checksums.first.push_back(num_crcs);
    num_crcs += static_cast<size_t>((size + kChecksumBytes - 1) / kChecksumBytes);
  }
  staged.checksums.first.push_back(num_crcs);
  const uint64_t left = in.remaining(), of_crcs = num_crcs * sizeof(uint32_t);
  staged.checksums.has_hashes = num_crcs > 0 && left == of_crcs + num_crcs * base::kEncodedHashBytes;
  if (left != of_crcs && !staged.checksums.has_hashes) return damaged();
  for (size_t i = 0; i < num_crcs; ++i) staged.checksums.crcs.push_back(in.u32());
  for (size_t i = 0; staged.checksums.has_hashes && i < num_crcs; ++i) {
    const uint64_t low = in.u64(), high = in.u64();
    staged.checksums.hashes.push_back({low, high});
  }
  return staged;
}

void list_staged(const std::shared_ptr<const StagedBytes>& staged) {
  ListedStates& all = base::of_process<ListedStates>();
  const base::MutexLock lock(all.mutex);
  auto& listed = all.listed;
  listed.erase(std::remove_if(listed.begin(), listed.end(), [](const auto& other) { return other.expired(); }),
               listed.end());
  listed.push_back(staged);
  all.count = listed.size();
}

KnownBytes find_staged(const tensor::StridedView& view) {
  ListedStates& all = base::of_process<ListedStates>();
  if (all.count == 0) return {};
  const int64_t bytes = tensor::span_bytes(view);
  if (bytes == 0) return {};
  std::shared_ptr<const StagedBytes> found;
  {
    const base::MutexLock lock(all.mutex);
    for (const auto& weak : all.listed) {
      const auto staged = weak.lock();
      if (staged == nullptr || staged->offsets.empty() || view.data < staged->first) continue;
      if (view.data - staged->first < staged->offsets.back() + staged->bytes.back()) found = staged;
    }
  }
  return found == nullptr ? KnownBytes() : look_in(*found, view.data - found->first, bytes, tensor::is_row_major(view));
}

base::Status changed_since_staged(uint32_t expected_crc, uint32_t crc) {
  return base::Status::make(base::Code::kCorrupt, base::text("memory has changed since it was staged: CRC-32 ",
                                                             expected_crc, " then, ", crc, " now"));
}

}  // namespace bytecheckpoint::staging
