// SPDX-License-Identifier: Apache-2.0
#include "csrc/engine/save/file_image.h"

#include <algorithm>
#include <cstring>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "csrc/base/crc32.h"
#include "csrc/engine/load/load_job.h"
#include "csrc/engine/open/open_checkpoint.h"
#include "csrc/staging/merge_pieces.h"
#include "csrc/staging/staged_bytes.h"
#include "tests/cpp/aligned_bytes.h"
#include "tests/cpp/memory_holder.h"
#include "tests/cpp/random_box.h"
#include "tests/cpp/rounds.h"
#include "tests/cpp/saved_checkpoint.h"
#include "tests/cpp/temp_dir.h"

namespace bytecheckpoint::engine {
namespace {

using base::Phase;
using test::draw;
using test::Random;
using test::SaveItem;
using test::TempDir;

constexpr int64_t kMib = 1 << 20;

tensor::StridedView view_of(uint8_t* memory, int64_t bytes) {
  return {memory, tensor::DType::kUInt8, {bytes}, {1}};
}

/// Tensors of bytes, staged as `StagedTree` stages them, or at places where nothing can be written directly.
struct StagedTensors {
  StagedTensors(const std::vector<int64_t>& sizes, bool is_aligned) {
    std::vector<tensor::StridedView> views;
    contents.reserve(sizes.size());  // views point into these strings
    for (const int64_t size : sizes) {
      contents.push_back(test::patterned(size, static_cast<uint32_t>(contents.size() + 1)));
      views.push_back(view_of(reinterpret_cast<uint8_t*>(contents.back().data()), size));
    }
    int64_t total = is_aligned ? 0 : 64;
    std::vector<staging::Piece> pieces;
    const staging::PieceAlignment at_pages{64, format::kLargeDataAlignment, format::kLargeDataBytes}, beside_pages{64};
    REQUIRE(staging::lay_out(std::move(views), is_aligned ? at_pages : beside_pages, &pieces, &total));
    memory = test::aligned_bytes(total);
    staging::PieceChecksums checksums;
    staging::merge_pieces(pieces, memory.get(), 2, &checksums);
    staged = std::make_shared<const staging::StagedBytes>(staging::StagedBytes::of(memory.get(), pieces, checksums));
    staging::list_staged(staged);
    for (size_t p = 0; p < pieces.size(); ++p) {
      items.push_back({base::text("tensor.", p),
                       {pieces[p].bytes},
                       tensor::whole({pieces[p].bytes}),
                       view_of(memory.get() + pieces[p].offset, pieces[p].bytes),
                       {}});
    }
  }

  std::vector<std::string> contents;
  test::AlignedBytes memory;
  std::shared_ptr<const staging::StagedBytes> staged;
  std::vector<SaveItem> items;
};

struct SavedTensors {
  format::Manifest manifest;
  int64_t copied_bytes = 0;  // to slots
  int64_t summed_bytes = 0;
};

SavedTensors save(const TempDir& dir, const StagedTensors& tensors, SaveOptions options) {
  options.trace = std::make_shared<base::Trace>(base::TraceOptions{});
  auto commit = test::value_of(Commit::begin(test::commit_options(dir.path(), 1)));
  const format::WriteResult result = test::value_of(test::write_items(tensors.items, options));
  const format::Manifest planned = test::planned(tensors.items, test::save_id_of(1));
  const format::Manifest manifest = test::value_of(assemble_manifest(planned, {result}));
  EXPECT_OK(commit->check_files(manifest.files));
  EXPECT_OK(commit->commit(format::encode_metadata_file(manifest), manifest.files, manifest.save_id));
  const auto totals = options.trace->lane("fill")->totals();
  return {test::value_of(open_checkpoint(dir.path(), {{}, /*check_pickle=*/true})),
          totals[static_cast<size_t>(Phase::kCopy)].bytes, totals[static_cast<size_t>(Phase::kChecksum)].bytes};
}

/// Loads all tensors, whose blocks are verified, and compares them.
void check_loaded(const TempDir& dir, const StagedTensors& tensors, const format::Manifest& manifest) {
  LoadOptions options;
  options.directory = dir.path();
  options.ring_bytes = 16 << 20;
  LoadJob job(options, manifest);
  std::vector<std::string> loaded;
  for (const std::string& content : tensors.contents) loaded.emplace_back(content.size(), '\xEE');
  for (size_t t = 0; t < loaded.size(); ++t) {
    const SaveItem& item = tensors.items[t];
    const format::Chunk& chunk = manifest.find(item.fqn)->chunks[0];
    EXPECT_OK(job.destinations().add_tensor(
        item.fqn, chunk, place_of(chunk), item.box,
        view_of(reinterpret_cast<uint8_t*>(loaded[t].data()), static_cast<int64_t>(loaded[t].size()))));
  }
  EXPECT_OK(job.run([] { return false; }));
  CHECK((loaded == tensors.contents));
}

TEST_CASE("file_image: large staged tensors are written from where they are, all else is copied") {
  const std::vector<int64_t> sizes = {5, kMib - 1, kMib, 3 * kMib + 1, 700, 20 * kMib + 4095, kMib + 4096, 0, 64};
  const int64_t borrowed = kMib + 3 * kMib + 20 * kMib + kMib + 4096;
  for (const bool direct : {true, false}) {
    CAPTURE(direct);
    const TempDir dir;
    const StagedTensors tensors(sizes, /*is_aligned=*/true);
    SaveOptions options = test::save_options(dir.path());
    options.direct_io = direct;
    const SavedTensors saved = save(dir, tensors, options);
    check_loaded(dir, tensors, saved.manifest);
    CHECK(saved.summed_bytes == saved.manifest.files[0].bytes);
    CHECK(saved.copied_bytes == saved.summed_bytes - borrowed);
  }
}

TEST_CASE("file_image: what cannot be written from where it is is copied") {
  const TempDir dir;
  const StagedTensors tensors({3 * kMib + 1, 9 * kMib}, /*is_aligned=*/false);
  const SavedTensors saved = save(dir, tensors, test::save_options(dir.path()));
  check_loaded(dir, tensors, saved.manifest);
  CHECK(saved.copied_bytes == saved.summed_bytes);
}

TEST_CASE("file_image: tensors of any sizes come back, however slots and other memory alternate") {
  Random random(11);
  for (int round = 0; round < test::rounds(12); ++round) {
    CAPTURE(round);
    std::vector<int64_t> sizes;
    for (int64_t i = draw(&random, 1, 12); i > 0; --i) {
      const int64_t about[] = {700, kMib / 4, kMib, 2 * kMib, staging::kSlotBytes - 8192};
      sizes.push_back(about[draw(&random, 0, 4)] + (draw(&random, 0, 1) == 0 ? 0 : draw(&random, 0, 9000)));
    }
    const TempDir dir;
    const StagedTensors tensors(sizes, draw(&random, 0, 4) != 0);
    SaveOptions options = test::save_options(dir.path());
    options.direct_io = draw(&random, 0, 2) != 0;
    options.num_io_threads = static_cast<int>(draw(&random, 1, 3));
    options.one_file_a_record = draw(&random, 0, 4) == 0;
    options.max_file_bytes = draw(&random, 0, 2) == 0 ? 12 * kMib : 0;
    check_loaded(dir, tensors, save(dir, tensors, options).manifest);
  }
}

TEST_CASE("file_image: a file that is memory is filled by several threads, and is what a file of a disk would be") {
  // 1: with what is reserved everything fits; 0: nothing is, and slots are written.
  for (const int reserved : {1, 0}) {
    CAPTURE(reserved);
    const auto holder = test::registered_holder();
    holder->most_bytes = 100 * kMib;
    const StagedTensors tensors({5, kMib - 1, 21 * kMib + 4095, 0, 700, 9 * kMib}, /*is_aligned=*/true);
    SaveOptions options = test::save_options(test::kHeldUrl);
    options.num_io_threads = 3;
    options.expected_bytes = reserved * 33 * kMib;
    options.trace = std::make_shared<base::Trace>(base::TraceOptions{});
    const format::WriteResult result = test::value_of(test::write_items(tensors.items, options));
    const auto totals = options.trace->lane("fill")->totals();
    CHECK((totals[static_cast<size_t>(Phase::kChecksum)].bytes == 0) == (reserved == 1));  // that is of slots
    REQUIRE(result.files.size() == 1);
    const std::string file = test::value_of(io::read_file(test::kHeldUrl, result.files[0].name));
    REQUIRE(static_cast<int64_t>(file.size()) == result.files[0].bytes);
    const format::DataTrailer trailer = test::value_of(format::decode_data_trailer(
        std::string_view(file).substr(file.size() - format::kDataTrailerBytes), static_cast<int64_t>(file.size())));
    const auto end = static_cast<size_t>(trailer.end_of_records);
    const auto table =
        format::decode_block_table(std::string_view(file).substr(end, static_cast<size_t>(trailer.table_bytes())));
    std::vector<uint32_t> sums;
    for (size_t at = 0; at < end; at += format::kBlockBytes) {
      sums.push_back(base::crc32(0, file.data() + at, std::min<size_t>(format::kBlockBytes, end - at)));
    }
    CHECK((table == sums));
    REQUIRE(result.records.size() == tensors.contents.size());
    for (size_t t = 0; t < tensors.contents.size(); ++t) {
      const format::Record& record = result.records[t].record;
      CHECK((file.substr(static_cast<size_t>(record.data_offset), static_cast<size_t>(record.data_bytes)) ==
             tensors.contents[t]));
      const auto archive = file.substr(static_cast<size_t>(record.offset), static_cast<size_t>(record.bytes));
      const uint32_t crc = base::crc32(0, tensors.contents[t].data(), tensors.contents[t].size());
      CHECK(archive.find(std::string(reinterpret_cast<const char*>(&crc), sizeof crc)) != std::string::npos);
    }
  }
}

TEST_CASE("file_image: a staged tensor that has changed fails the save, copied or not") {
  for (const int64_t size : {kMib - 1, 5 * kMib + 3}) {
    const TempDir dir;
    const StagedTensors tensors({100, size}, /*is_aligned=*/true);
    tensors.items[1].view.data[size - 1] ^= 1;
    EXPECT_FAILURE(kCorrupt, "memory has changed since it was staged",
                   test::write_items(tensors.items, test::save_options(dir.path())));
  }
}

}  // namespace
}  // namespace bytecheckpoint::engine
