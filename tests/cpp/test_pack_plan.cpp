// SPDX-License-Identifier: Apache-2.0
#include "csrc/staging/pack_plan.h"

#include <doctest/doctest.h>

#include <limits>

#include "tests/cpp/device_memory.h"
#include "tests/cpp/rounds.h"

namespace bytecheckpoint::staging {
namespace {

using tensor::Dims;
using tensor::DType;
using test::Random;
using test::SampleTensor;

constexpr uint8_t kGapByte = 0x5A;  // content of the host buffer before the copies

/// Tensors, and offsets that sometimes leave gaps, as headers and padding do.
struct Transfer {
  std::vector<SampleTensor> tensors;
  std::vector<DevicePiece> pieces;
  int64_t host_bytes = 0;

  Transfer(Random* random, bool expand) {
    const int64_t count = test::draw(random, 0, 12);
    for (int64_t i = 0; i < count; ++i) {
      const int64_t itemsize = int64_t{1} << test::draw(random, 0, 4);
      const bool many = test::draw(random, 0, 9) == 0;  // many dims, so that some have no layout
      const int64_t max_size = test::draw(random, 0, 4) == 0 ? 24 : 6;
      tensors.emplace_back(random, test::draw_sizes(random, many ? 11 : 3, many ? 2 : max_size), itemsize, expand);
      const int64_t gap = test::draw(random, 0, 1) == 0 ? 0 : test::draw(random, 1, 300);
      host_bytes = test::draw(random, 0, 2) == 0 ? host_bytes + gap : (host_bytes + gap + 15) / 16 * 16;
      pieces.push_back({tensors.back().view(), host_bytes});
      host_bytes += static_cast<int64_t>(tensors.back().packed().size());
    }
    host_bytes += 32;
  }
};

PackLimits draw_limits(Random* random) {
  PackLimits limits;
  limits.scratch_bytes = test::draw(random, 0, 7) == 0 ? 0
                                                       : test::draw(random, PackLimits::kMinScratchBytes,
                                                                    test::draw(random, 0, 1) == 0 ? 4096 : 200000);
  limits.max_pieces = test::draw(random, 1, test::draw(random, 0, 1) == 0 ? 3 : 100);
  limits.max_packed_bytes = test::draw(random, 0, test::draw(random, 0, 1) == 0 ? 64 : 100000);
  limits.max_gap_bytes = test::draw(random, 0, test::draw(random, 0, 1) == 0 ? 16 : 400);
  return limits;
}

void check_batch(const PackBatch& batch, const PackLimits& limits) {
  REQUIRE(batch.scratch_bytes <= limits.scratch_bytes);
  REQUIRE(static_cast<int64_t>(batch.pieces.size()) <= limits.max_pieces);
  REQUIRE(static_cast<int64_t>(batch.tiles.size()) <= limits.max_tiles());
  int64_t scratch_end = 0, host_end = -1;
  for (const PackedRange& range : batch.ranges) {
    REQUIRE(range.scratch_offset >= scratch_end);
    REQUIRE(range.host_offset > host_end);
    REQUIRE(range.scratch_offset % 256 == range.host_offset % 256);
    REQUIRE(range.bytes > 0);
    scratch_end = range.scratch_offset + range.bytes;
    host_end = range.host_offset + range.bytes;
  }
  REQUIRE(scratch_end == batch.scratch_bytes);
}

/// Does what a device does with a batch, but in another order, because threads and tiles are independent of each other.
template <class Move>
void for_each_tile(const PackBatch& batch, std::vector<uint8_t>* scratch, Move&& move) {
  for (const Tile& tile : batch.tiles) {
    const PackedPiece& piece = batch.pieces[tile.piece];
    const int64_t at = piece.scratch_offset + tile.first_unit * piece.layout.unit_bytes;
    REQUIRE(at >= 0);
    REQUIRE(at + tile_bytes(piece.layout, tile) <= batch.scratch_bytes);
    REQUIRE(tile_bytes(piece.layout, tile) < kTileBytes + 16);
    for (uint32_t thread = 7; thread-- > 0;) move(piece.layout, tile, scratch->data() + at, thread, 7u);
  }
}

TEST_CASE("pack_plan: batches gathered in turn fill the host buffer, and gaps with nothing but zeros") {
  Random random(41);
  int num_gaps = 0, num_divided = 0, num_direct = 0;
  for (int round = 0; round < test::rounds(1500); ++round) {
    const Transfer transfer(&random, true);
    REQUIRE(check_pieces(transfer.pieces).is_ok());
    const PackLimits limits = draw_limits(&random);
    std::vector<uint8_t> scratch(static_cast<size_t>(limits.scratch_bytes));
    std::vector<uint8_t> host(static_cast<size_t>(transfer.host_bytes), kGapByte);
    PackPlan plan(transfer.pieces, limits);
    PackBatch batch;
    size_t num_packed = 0;
    while (plan.next(&batch)) {
      check_batch(batch, limits);
      num_packed += batch.pieces.size();
      scratch = test::random_bytes(&random, scratch.size());  // stale content of an earlier batch
      if (batch.has_gaps) std::fill_n(scratch.begin(), batch.scratch_bytes, uint8_t{0});
      num_gaps += batch.has_gaps;
      for_each_tile(batch, &scratch, [](auto&&... of_tile) { gather_tile(of_tile...); });
      // Direct copies come first, so that the test notices a range that overwrites them.
      for (const size_t piece : batch.direct) {
        const std::vector<uint8_t> packed = transfer.tensors[piece].packed();
        std::copy(packed.begin(), packed.end(), host.begin() + transfer.pieces[piece].host_offset);
        ++num_direct;
      }
      for (const PackedRange& range : batch.ranges) {
        std::copy_n(scratch.begin() + range.scratch_offset, range.bytes, host.begin() + range.host_offset);
      }
    }
    REQUIRE(!plan.next(&batch));
    num_divided += num_packed > transfer.pieces.size();

    int64_t end = 0;
    for (size_t i = 0; i < transfer.pieces.size(); ++i) {
      const std::vector<uint8_t> packed = transfer.tensors[i].packed();
      const int64_t begin = transfer.pieces[i].host_offset;
      REQUIRE(std::equal(packed.begin(), packed.end(), host.begin() + begin));
      REQUIRE(std::all_of(host.begin() + end, host.begin() + begin,
                          [](uint8_t byte) { return byte == kGapByte || byte == 0; }));
      end = begin + static_cast<int64_t>(packed.size());
    }
    REQUIRE(std::all_of(host.begin() + end, host.end(), [](uint8_t byte) { return byte == kGapByte; }));
  }
  // All the cases have occurred.
  CHECK(num_gaps > test::rounds(100));
  CHECK(num_divided > test::rounds(20));
  CHECK(num_direct > test::rounds(100));
}

TEST_CASE("pack_plan: batches scattered in turn set the tensors and nothing else") {
  Random random(42);
  for (int round = 0; round < test::rounds(1500); ++round) {
    Transfer transfer(&random, false);
    const PackLimits limits = draw_limits(&random);
    const std::vector<uint8_t> host = test::random_bytes(&random, static_cast<size_t>(transfer.host_bytes));
    std::vector<std::vector<uint8_t>> expected;
    for (size_t i = 0; i < transfer.pieces.size(); ++i) {
      const auto begin = host.begin() + transfer.pieces[i].host_offset;
      const auto bytes = static_cast<std::ptrdiff_t>(transfer.tensors[i].packed().size());
      expected.push_back(transfer.tensors[i].block_with({begin, begin + bytes}));
    }
    std::vector<uint8_t> scratch(static_cast<size_t>(limits.scratch_bytes));
    PackPlan plan(transfer.pieces, limits);
    PackBatch batch;
    std::vector<bool> is_direct(transfer.pieces.size(), false);
    while (plan.next(&batch)) {
      check_batch(batch, limits);
      scratch = test::random_bytes(&random, scratch.size());
      for (const PackedRange& range : batch.ranges) {
        std::copy_n(host.begin() + range.host_offset, range.bytes, scratch.begin() + range.scratch_offset);
      }
      for_each_tile(batch, &scratch, [](auto&&... of_tile) { scatter_tile(of_tile...); });
      for (const size_t piece : batch.direct) is_direct[piece] = true;
    }
    for (size_t i = 0; i < expected.size(); ++i) {
      if (!is_direct[i]) REQUIRE(transfer.tensors[i].block() == expected[i]);
    }
  }
}

TEST_CASE("pack_plan: many small tensors are one range, a large one between them goes past it") {
  std::vector<uint8_t> memory(1 << 20);
  std::vector<DevicePiece> pieces;
  int64_t offset = 4096;
  const auto add = [&](int64_t bytes) {
    pieces.push_back({{memory.data(), DType::kUInt8, {bytes}, {1}}, offset});
    offset += (bytes + 63) / 64 * 64;
  };
  for (int i = 0; i < 5; ++i) add(1000);
  add(500000);
  for (int i = 0; i < 5; ++i) add(1000);
  PackLimits limits;
  limits.scratch_bytes = 1 << 20;
  limits.max_pieces = 100;
  limits.max_packed_bytes = 100000;
  limits.max_gap_bytes = 1 << 20;  // more than the large tensor's size
  PackPlan plan(pieces, limits);
  PackBatch batch;
  REQUIRE(plan.next(&batch));
  CHECK(batch.pieces.size() == 10);
  CHECK(batch.direct == std::vector<size_t>{5});
  REQUIRE(batch.ranges.size() == 2);
  CHECK(batch.ranges[0].host_offset == 4096);
  CHECK(batch.ranges[0].bytes == 4 * 1024 + 1000);
  CHECK(batch.ranges[1].host_offset == pieces[6].host_offset);
  CHECK(batch.has_gaps);
  CHECK(!plan.next(&batch));
}

TEST_CASE("pack_plan: pieces that no transfer can have") {
  uint8_t memory[64];
  const auto of = [&](int64_t bytes, int64_t offset) {
    return DevicePiece{{memory, DType::kUInt8, {bytes}, {1}}, offset};
  };
  const auto code_of = [](const std::vector<DevicePiece>& pieces) { return check_pieces(pieces).code(); };
  using base::Code;
  CHECK(code_of({}) == Code::kOk);
  CHECK(code_of({of(8, 0), of(8, 8), of(8, 100)}) == Code::kOk);
  CHECK(code_of({of(8, 8), of(0, 3), of(8, 16)}) == Code::kOk);  // an empty piece occupies nothing
  CHECK(code_of({of(8, -1)}) == Code::kInvalidArgument);
  CHECK(code_of({of(8, 0), of(8, 7)}) == Code::kInvalidArgument);
  CHECK(code_of({of(8, 8), of(8, 0)}) == Code::kInvalidArgument);
  CHECK(code_of({of(8, std::numeric_limits<int64_t>::max() - 7)}) == Code::kInvalidArgument);
  CHECK(code_of({{{memory, DType::kNone, {1}, {1}}, 0}}) == Code::kInvalidArgument);
  CHECK(code_of({{{memory, DType::kQInt8, {1}, {1}}, 0}}) == Code::kInvalidArgument);
  CHECK(code_of({{{memory, DType::kInt8, {1, 1}, {1}}, 0}}) == Code::kInvalidArgument);
  CHECK(code_of({{{memory, DType::kInt8, {-1}, {1}}, 0}}) == Code::kInvalidArgument);
  CHECK(code_of({{{memory, DType::kInt16, {int64_t{1} << 62}, {0}}, 0}}) == Code::kInvalidArgument);
  CHECK(code_of({{{nullptr, DType::kInt16, {2}, {2}}, 0}}) == Code::kInvalidArgument);
}

}  // namespace
}  // namespace bytecheckpoint::staging
