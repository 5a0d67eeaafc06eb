// SPDX-License-Identifier: Apache-2.0
#include "csrc/staging/merge_pieces.h"

#include <doctest/doctest.h>

#include <algorithm>
#include <cstring>
#include <limits>
#include <vector>

#include "csrc/base/crc32.h"
#include "csrc/staging/stream_copy.h"
#include "tests/cpp/random_box.h"

namespace bytecheckpoint::staging {
namespace {

using tensor::Dims;
using tensor::StridedView;
using test::Random;
using test::RandomMemory;

constexpr uint8_t kUntouched = 0xA5;

StridedView draw_view(Random* random, std::vector<RandomMemory>* memories, int64_t max_dims, int64_t max_size,
                      bool expand) {
  StridedView view;
  view.dtype = test::draw_plain_dtype(random);
  view.sizes = test::draw_sizes(random, max_dims, max_size);
  const int64_t itemsize = tensor::find_dtype(view.dtype)->itemsize_bytes;
  memories->push_back(test::draw_memory(random, view.sizes, itemsize, expand));
  view.strides_bytes = memories->back().strides_bytes;
  view.data = memories->back().data();
  return view;
}

/// Row-major bytes, collected element by element.
std::vector<uint8_t> elements_of(const StridedView& view) {
  const int64_t itemsize = tensor::find_dtype(view.dtype)->itemsize_bytes;
  std::vector<uint8_t> bytes;
  test::for_each_index(view.sizes, [&](const Dims& index) {
    const uint8_t* element = view.data + test::dot(index, view.strides_bytes);
    bytes.insert(bytes.end(), element, element + itemsize);
  });
  return bytes;
}

void check_merged(const std::vector<Piece>& pieces, int64_t total, int num_threads) {
  std::vector<uint8_t> merged(static_cast<size_t>(total + 1), kUntouched);
  std::vector<uint8_t> expected = merged;
  PieceChecksums checksums;
  merge_pieces(pieces, merged.data(), num_threads, &checksums);
  REQUIRE(checksums.first.size() == pieces.size() + 1);
  REQUIRE(checksums.first.back() == checksums.crcs.size());
  for (size_t p = 0; p < pieces.size(); ++p) {
    const std::vector<uint8_t> bytes = elements_of(pieces[p].view);
    REQUIRE(static_cast<int64_t>(bytes.size()) == pieces[p].bytes);
    if (!bytes.empty()) std::memcpy(expected.data() + pieces[p].offset, bytes.data(), bytes.size());
    size_t sum = checksums.first[p];
    for (size_t begin = 0; begin < bytes.size(); begin += kChecksumBytes) {
      const size_t size = std::min<size_t>(kChecksumBytes, bytes.size() - begin);
      CHECK(checksums.crcs[sum++] == base::crc32(0, bytes.data() + begin, size));
    }
    CHECK(sum == checksums.first[p + 1]);
  }
  CHECK(merged == expected);
  std::vector<Piece> from_elsewhere = pieces;
  for (Piece& piece : from_elsewhere) piece.view.data = nullptr;
  PieceChecksums afterwards;
  checksum_pieces(from_elsewhere, merged.data(), num_threads, &afterwards);
  CHECK(afterwards.crcs == checksums.crcs);
  CHECK(afterwards.first == checksums.first);
  std::vector<uint8_t> without_checksums(merged.size(), kUntouched);
  merge_pieces(pieces, without_checksums.data(), num_threads, nullptr);
  CHECK(without_checksums == expected);
}

TEST_CASE("merge_pieces: what is merged are the elements of every piece, and the bytes between are left alone") {
  Random random(21);
  for (int round = 0; round < 300; ++round) {
    std::vector<RandomMemory> memories;
    std::vector<StridedView> views;
    for (int64_t i = test::draw(&random, 0, 12); i > 0; --i) {
      views.push_back(draw_view(&random, &memories, 4, 7, true));
    }
    std::vector<Piece> pieces;
    int64_t total = 0;
    const int64_t alignment = int64_t{1} << test::draw(&random, 0, 6);
    REQUIRE(lay_out(std::move(views), {alignment, alignment}, &pieces, &total));
    check_merged(pieces, total, static_cast<int>(test::draw(&random, 0, 4)));
  }
}

TEST_CASE("merge_pieces: large pieces are cut between threads and have a CRC a stretch") {
  Random random(22);
  for (const bool strided : {false, true}) {
    RandomMemory memory;
    StridedView view;
    view.dtype = tensor::DType::kFloat32;
    view.sizes = {1100, 1300};  // 5.7 MB
    memory.bytes.resize(static_cast<size_t>(1100 * 1300 * 4 * 2 + 3));
    for (uint8_t& byte : memory.bytes) byte = static_cast<uint8_t>(random());
    view.data = memory.bytes.data() + 3;  // elements need not be aligned
    view.strides_bytes = strided ? Dims{4, 1100 * 4 * 2} : Dims{1300 * 4, 4};
    std::vector<Piece> pieces;
    int64_t total = 0;
    REQUIRE(lay_out({view, view}, {64, 64}, &pieces, &total));
    for (const int num_threads : {1, 3}) check_merged(pieces, total, num_threads);
  }
}

TEST_CASE("merge_pieces: scattering puts every element back where it was") {
  Random random(23);
  for (int round = 0; round < 300; ++round) {
    std::vector<RandomMemory> memories;
    std::vector<StridedView> views;
    for (int64_t i = test::draw(&random, 0, 12); i > 0; --i) {
      views.push_back(draw_view(&random, &memories, 4, 7, false));
    }
    std::vector<Piece> pieces;
    int64_t total = 0;
    const int64_t alignment = int64_t{1} << test::draw(&random, 0, 6);
    REQUIRE(lay_out(std::move(views), {alignment, alignment}, &pieces, &total));
    std::vector<uint8_t> merged(static_cast<size_t>(total));
    const int num_threads = static_cast<int>(test::draw(&random, 1, 4));
    merge_pieces(pieces, merged.data(), num_threads, nullptr);
    std::vector<std::vector<uint8_t>> before;
    for (size_t p = 0; p < pieces.size(); ++p) {
      before.push_back(memories[p].bytes);
      for (uint8_t& byte : memories[p].bytes) byte = static_cast<uint8_t>(~byte);
    }
    scatter_pieces(pieces, merged.data(), num_threads);
    for (size_t p = 0; p < pieces.size(); ++p) {
      const StridedView& view = pieces[p].view;
      const int64_t itemsize = tensor::find_dtype(view.dtype)->itemsize_bytes;
      std::vector<uint8_t> expected = before[p];
      for (uint8_t& byte : expected) byte = static_cast<uint8_t>(~byte);
      test::for_each_index(view.sizes, [&](const Dims& index) {
        const int64_t at = view.data - memories[p].bytes.data() + test::dot(index, view.strides_bytes);
        std::memcpy(expected.data() + at, before[p].data() + at, static_cast<size_t>(itemsize));
      });
      CHECK(memories[p].bytes == expected);
    }
  }
}

TEST_CASE("merge_pieces: a layout goes on behind another") {
  StridedView view;
  view.dtype = tensor::DType::kFloat32;
  view.sizes = {3};
  view.strides_bytes = {4};
  std::vector<Piece> first, second;
  int64_t total = 0;
  REQUIRE(lay_out({view}, {64, 64}, &first, &total));
  CHECK(total == 12);
  REQUIRE(lay_out({view, view}, {64, 64}, &second, &total));
  CHECK(second[0].offset == 64);
  CHECK(second[1].offset == 128);
  CHECK(total == 140);
}

TEST_CASE("merge_pieces: large pieces begin at a page, others in a cache line") {
  StridedView small, large;
  small.dtype = large.dtype = tensor::DType::kUInt8;
  small.strides_bytes = large.strides_bytes = {1};
  const int64_t mib = 1 << 20;
  const PieceAlignment alignment{64, 4096, mib};
  small.sizes = {mib - 1};
  large.sizes = {mib};
  std::vector<Piece> pieces;
  int64_t total = 0;
  REQUIRE(lay_out({small, small, large, small, large}, alignment, &pieces, &total));
  std::vector<int64_t> offsets;
  for (const Piece& piece : pieces) offsets.push_back(piece.offset);
  CHECK(offsets == std::vector<int64_t>{0, mib, 2 * mib, 3 * mib, 4 * mib});
  total = 1;
  pieces.clear();
  REQUIRE(lay_out({large, small, large}, alignment, &pieces, &total));
  CHECK(pieces[0].offset == 4096);
  CHECK(pieces[1].offset == 4096 + mib);
  CHECK(pieces[2].offset == 4096 + 2 * mib);
  CHECK(total == 4096 + 3 * mib);
}

TEST_CASE("merge_pieces: more bytes than can be counted are no layout") {
  StridedView view;
  view.dtype = tensor::DType::kFloat64;
  view.sizes = {int64_t{1} << 59};
  view.strides_bytes = {0};
  std::vector<Piece> pieces;
  int64_t total = 0;
  CHECK(lay_out({view}, {64, 64}, &pieces, &total));
  pieces.clear();
  CHECK_FALSE(lay_out({view, view}, {64, 64}, &pieces, &total));
  view.sizes = {std::numeric_limits<int64_t>::max()};
  pieces.clear();
  CHECK_FALSE(lay_out({view}, {64, 64}, &pieces, &total));
}

TEST_CASE("stream_copy: every kernel copies whole lines, wherever it fetches what is next") {
  Random random(25);
  std::vector<uint8_t> from(700), to(704);
  for (uint8_t& byte : from) byte = static_cast<uint8_t>(random());
  uint8_t* const line = to.data() + (-reinterpret_cast<uintptr_t>(to.data()) % 64);
  for (const StreamKernel& kernel : stream_kernels()) {
    CAPTURE(kernel.name);
    for (const int64_t bytes : {0, 64, 128, 576}) {
      for (const uint8_t* next : {line, reinterpret_cast<uint8_t*>(1 << 12)}) {
        std::fill(to.begin(), to.end(), kUntouched);
        kernel.copy_lines(line, from.data() + 3, bytes, next, bytes);  // nothing is there: a fetch never faults
        end_stream_copies();
        CHECK(std::equal(line, line + bytes, from.data() + 3));
        CHECK(line[bytes] == kUntouched);
      }
    }
  }
}

TEST_CASE("stream_copy: every alignment and length, and nothing beyond") {
  Random random(24);
  std::vector<uint8_t> from(400);
  for (uint8_t& byte : from) byte = static_cast<uint8_t>(random());
  for (size_t to_shift = 0; to_shift < 65; ++to_shift) {
    for (const size_t from_shift : {0, 1, 16, 33}) {
      for (const size_t bytes : {0, 1, 15, 63, 64, 65, 127, 128, 200, 300}) {
        std::vector<uint8_t> to(400, kUntouched), expected = to;
        stream_copy(to.data() + to_shift, from.data() + from_shift, static_cast<int64_t>(bytes));
        end_stream_copies();
        std::memcpy(expected.data() + to_shift, from.data() + from_shift, bytes);
        REQUIRE(to == expected);
      }
    }
  }
}

}  // namespace
}  // namespace bytecheckpoint::staging
