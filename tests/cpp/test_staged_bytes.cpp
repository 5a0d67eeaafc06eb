// SPDX-License-Identifier: Apache-2.0
#include "csrc/staging/staged_bytes.h"

#include <doctest/doctest.h>

#include <vector>

#include "csrc/base/crc32.h"
#include "tests/cpp/expect.h"

namespace bytecheckpoint::staging {
namespace {

using base::Code;

/// Pieces of these sizes, one after the other at multiples of 64, merged and listed.
struct Merged {
  explicit Merged(const std::vector<int64_t>& sizes) {
    std::vector<tensor::StridedView> views;
    for (const int64_t size : sizes) {
      auto& memory = sources.emplace_back(static_cast<size_t>(size));
      for (size_t i = 0; i < memory.size(); ++i) memory[i] = static_cast<uint8_t>(i * 7 + sources.size());
      views.push_back({memory.data(), tensor::DType::kUInt8, {size}, {1}});
    }
    int64_t total = 0;
    REQUIRE(lay_out(std::move(views), {64, 64}, &pieces, &total));
    memory.resize(static_cast<size_t>(total) + 64);
    PieceChecksums checksums;
    merge_pieces(pieces, memory.data(), 2, &checksums);
    staged = std::make_shared<const StagedBytes>(StagedBytes::of(memory.data(), pieces, checksums));
    list_staged(staged);
  }
  static tensor::StridedView view(uint8_t* begin, int64_t bytes) {
    return {begin, tensor::DType::kUInt8, {bytes}, {1}};
  }
  uint8_t* at(size_t piece) { return memory.data() + pieces[piece].offset; }

  std::vector<std::vector<uint8_t>> sources;
  std::vector<Piece> pieces;
  std::vector<uint8_t> memory;
  std::shared_ptr<const StagedBytes> staged;
};

TEST_CASE("staged_bytes: a whole piece is known by its CRC, however long it is") {
  Merged merged({0, 100, 0, 3 * kChecksumBytes + 5, 0, kChecksumBytes, 64, 1});
  for (size_t p = 0; p < merged.pieces.size(); ++p) {
    const int64_t bytes = merged.pieces[p].bytes;
    const KnownBytes known = find_staged(Merged::view(merged.at(p), bytes));
    CHECK(known.status.is_ok());
    CHECK(known.crc.has_value() == (bytes != 0));
    if (bytes != 0) CHECK(*known.crc == base::crc32(0, merged.sources[p].data(), merged.sources[p].size()));
  }
}

TEST_CASE("staged_bytes: a part of a piece is refused if a stretch of it has changed, and only then") {
  Merged merged({100, 3 * kChecksumBytes});
  uint8_t* const piece = merged.at(1);
  const auto part = [&](int64_t begin, int64_t bytes) { return find_staged(Merged::view(piece + begin, bytes)); };
  CHECK(part(kChecksumBytes + 10, 20).status.is_ok());
  CHECK_FALSE(part(kChecksumBytes + 10, 20).crc.has_value());
  piece[kChecksumBytes + 500] ^= 1;
  CHECK(part(kChecksumBytes + 10, 20).status.code() == Code::kCorrupt);
  CHECK(part(0, kChecksumBytes + 1).status.code() == Code::kCorrupt);
  CHECK(part(kChecksumBytes - 1, kChecksumBytes + 2).status.code() == Code::kCorrupt);
  CHECK(part(1, kChecksumBytes - 1).status.is_ok());
  CHECK(part(2 * kChecksumBytes, kChecksumBytes).status.is_ok());
  CHECK(part(3 * kChecksumBytes - 1, 1).status.is_ok());
  piece[kChecksumBytes + 500] ^= 1;
  CHECK(part(0, 3 * kChecksumBytes - 1).status.is_ok());
}

TEST_CASE("staged_bytes: a piece that is read in another order has no CRC, and is checked") {
  Merged merged({16 * 100});
  tensor::StridedView transposed{merged.at(0), tensor::DType::kFloat32, {20, 20}, {4, 80}};
  CHECK(find_staged(transposed).status.is_ok());
  CHECK_FALSE(find_staged(transposed).crc.has_value());
  merged.at(0)[799] ^= 1;
  CHECK(find_staged(transposed).status.code() == Code::kCorrupt);
}

TEST_CASE("staged_bytes: another process is told the same, and refuses what does not fit its memory") {
  const Merged merged({0, 100, 3 * kChecksumBytes + 5, 64});
  const std::string encoded = encode_staged(*merged.staged);
  const auto num_bytes = static_cast<int64_t>(merged.memory.size());
  const auto decoded = test::value_of(decode_staged(encoded, merged.memory.data(), num_bytes));
  CHECK(decoded.offsets == merged.staged->offsets);
  CHECK(decoded.bytes == merged.staged->bytes);
  CHECK(decoded.checksums.crcs == merged.staged->checksums.crcs);
  CHECK(decoded.checksums.first == merged.staged->checksums.first);
  CHECK(decode_staged(encoded, merged.memory.data(), 3 * kChecksumBytes).status().code() == Code::kInvalidArgument);
  for (size_t size = 0; size < encoded.size(); ++size) {
    CHECK_FALSE(decode_staged(encoded.substr(0, size), merged.memory.data(), num_bytes).is_ok());
  }
}

TEST_CASE("staged_bytes: what was summed in parts is known as if it had been at once") {
  const Merged merged({0, 100, 3 * kChecksumBytes + 5, 0, 64});
  for (size_t cut = 0; cut <= merged.pieces.size(); ++cut) {
    const auto begin = merged.pieces.begin();
    const auto at_cut = begin + static_cast<std::ptrdiff_t>(cut);
    const std::vector<Piece> head(begin, at_cut), tail(at_cut, merged.pieces.end());
    PieceChecksums of_head, of_tail;
    checksum_pieces(head, merged.memory.data(), 1, &of_head);
    checksum_pieces(tail, merged.memory.data(), 2, &of_tail);
    StagedBytes staged = StagedBytes::of(merged.memory.data(), head, of_head);
    staged.add(tail, of_tail);
    CHECK(encode_staged(staged) == encode_staged(*merged.staged));
    CHECK(staged.checksums.first == merged.staged->checksums.first);
  }
}

TEST_CASE("staged_bytes: of memory that is nobody's, or no longer listed, nothing is known") {
  std::vector<uint8_t> other(100);
  Merged merged({100, 100});
  CHECK_FALSE(find_staged(Merged::view(other.data(), 100)).crc.has_value());
  CHECK_FALSE(find_staged(Merged::view(merged.at(0) + 110, 5)).crc.has_value());  // between pieces
  CHECK(find_staged(Merged::view(merged.at(0), 100)).crc.has_value());
  merged.staged.reset();
  CHECK_FALSE(find_staged(Merged::view(merged.at(0), 100)).crc.has_value());
  CHECK(find_staged(Merged::view(nullptr, 0)).status.is_ok());
}

}  // namespace
}  // namespace bytecheckpoint::staging
