// SPDX-License-Identifier: Apache-2.0
#include "csrc/format/manifest/manifest_view.h"

#include <cstring>
#include <string>

#include "csrc/base/crc32.h"
#include "tests/cpp/expect.h"
#include "tests/cpp/random_manifest.h"
#include "tests/cpp/rounds.h"
#include "tests/cpp/sample_manifest.h"

// The expected values come from decode_manifest and a scan of all chunks.

namespace bytecheckpoint::format {
namespace {

using tensor::Box;

ReadInto reader_of(const std::string& file) {
  return [&file](int64_t offset, int64_t size, char* into) {
    REQUIRE(offset >= 0);
    REQUIRE(size >= 0);
    REQUIRE(offset + size <= static_cast<int64_t>(file.size()));
    std::memcpy(into, file.data() + offset, static_cast<size_t>(size));
    return base::Status::ok();
  };
}

base::Result<ManifestView> open(const std::string& file) {
  return ManifestView::open(static_cast<int64_t>(file.size()), reader_of(file));
}

bool same(const Chunk& a, const Chunk& b) {
  const Record &x = a.record, &y = b.record;
  return a.box == b.box && x.kind == y.kind && x.stored_dtype == y.stored_dtype && x.file == y.file &&
         x.offset == y.offset && x.bytes == y.bytes && x.data_offset == y.data_offset && x.data_bytes == y.data_bytes;
}

std::vector<Chunk> overlapping(const Item& item, const Box& box) {
  std::vector<Chunk> chunks;
  Box common;
  for (const Chunk& chunk : item.chunks) {
    if (tensor::intersect(chunk.box, box, &common)) chunks.push_back(chunk);
  }
  return chunks;
}

int64_t numel_of(const tensor::Dims& sizes) {
  int64_t numel = 0;
  REQUIRE(tensor::checked_numel(sizes, &numel));
  return numel;
}

/// Compares everything that a view says about `item` with the item.
void check_item(ManifestView* view, const Item& item, test::Random* random) {
  const auto found = test::value_of(view->find_item(item.fqn));
  REQUIRE(found.has_value());
  REQUIRE(found->item.is_tensor == item.is_tensor);
  REQUIRE(found->item.ordinal == item.ordinal);
  REQUIRE(found->item.tensor.dtype == item.tensor.dtype);
  REQUIRE(found->item.tensor.sizes == item.tensor.sizes);
  REQUIRE(found->num_chunks == item.chunks.size());
  for (uint32_t c = 0; c < found->num_chunks; ++c) {
    REQUIRE(same(test::value_of(view->read_chunk(*found, c)), item.chunks[c]));
  }
  EXPECT_CODE(kInvalidArgument, view->read_chunk(*found, found->num_chunks));
  for (int n = 0; n < 8; ++n) {
    Box box = test::draw_box(random, item.tensor.sizes);
    if (n == 0) box = tensor::whole(item.tensor.sizes);
    if (n == 1 && !item.chunks.empty()) box = item.chunks[(*random)() % item.chunks.size()].box;
    const std::vector<Chunk> wanted = overlapping(item, box);
    const std::vector<Chunk> got = test::value_of(view->read_overlapping(*found, box));
    REQUIRE(got.size() == wanted.size());
    for (size_t c = 0; c < got.size(); ++c) REQUIRE(same(got[c], wanted[c]));
  }
}

TEST_CASE("manifest_view: items are found in any order, and what lies between them is not") {
  test::Random random(22);
  for (int round = 0; round < test::rounds(40); ++round) {
    const Manifest manifest = test::draw_manifest(&random, 1 + static_cast<int>(random() % 400), 1);
    const std::string file = encode_metadata_file(manifest);
    ManifestView view = test::value_of(open(file));
    for (size_t n = 0; n < 4 * manifest.items.size(); ++n) {
      // Neighbours, in either direction, and others.
      const size_t number = random() % 3 == 0 ? random() % manifest.items.size()
                                              : (n + random() % 5 + manifest.items.size()) % manifest.items.size();
      const Item& item = manifest.items[number];
      const auto found = test::value_of(view.find_item(item.fqn));
      REQUIRE(found.has_value());
      REQUIRE(found->item.ordinal == item.ordinal);
      const std::string between = item.fqn + '\x01';
      REQUIRE(test::value_of(view.find_item(between)).has_value() == (manifest.find(between) != nullptr));
    }
  }
}

TEST_CASE("manifest_view: says of every item what decoding the whole says") {
  test::Random random(21);
  for (int round = 0; round < test::rounds(400); ++round) {
    const Manifest manifest = test::draw_manifest(&random, round % 10 == 0 ? 300 : 10, 6);
    const std::string file = encode_metadata_file(manifest);
    ManifestView view = test::value_of(open(file));
    REQUIRE(view.save_id() == manifest.save_id);
    REQUIRE(view.num_items() == manifest.items.size());
    REQUIRE(view.num_files() == manifest.files.size());
    const std::vector<std::string> names = test::value_of(view.read_names());
    REQUIRE(names.size() == manifest.items.size());
    for (size_t i = 0; i < names.size(); ++i) REQUIRE(names[i] == manifest.items[i].fqn);
    for (const Item& item : manifest.items) check_item(&view, item, &random);
    for (size_t i = 0; i < manifest.items.size(); ++i) {
      const Item& item = manifest.items[i];
      const Item boxes = test::value_of(view.read_boxes(i));
      REQUIRE(boxes.fqn == item.fqn);
      REQUIRE(boxes.is_tensor == item.is_tensor);
      REQUIRE(boxes.is_partial == item.is_partial);
      REQUIRE(boxes.tensor.sizes == item.tensor.sizes);
      REQUIRE(boxes.chunks.size() == item.chunks.size());
      for (size_t c = 0; c < item.chunks.size(); ++c) REQUIRE(boxes.chunks[c].box == item.chunks[c].box);
    }
    EXPECT_CODE(kCorrupt, view.read_boxes(manifest.items.size()));
    for (const char* absent : {"", "0", "x", "xxxx", "\xff"}) {
      if (manifest.find(absent) == nullptr) REQUIRE_FALSE(test::value_of(view.find_item(absent)).has_value());
    }
    for (uint32_t f = 0; f < manifest.files.size(); ++f) {
      const FileEntry entry = test::value_of(view.read_file(f));
      REQUIRE(entry.name == manifest.files[f].name);
      REQUIRE(entry.bytes == manifest.files[f].bytes);
    }
    EXPECT_CODE(kCorrupt, view.read_file(static_cast<uint32_t>(manifest.files.size())));
  }
}

TEST_CASE("manifest_view: a box outside the tensor is refused, one without elements has no chunks") {
  const std::string file = encode_metadata_file(test::sample_manifest());
  ManifestView view = test::value_of(open(file));
  const auto weight = test::value_of(view.find_item("layer.weight"));
  EXPECT_FAILURE(kInvalidArgument, "outside shape [4, 5]", view.read_overlapping(*weight, {{3, 0}, {2, 5}}));
  EXPECT_CODE(kInvalidArgument, view.read_overlapping(*weight, {{0}, {4}}));
  EXPECT_CODE(kInvalidArgument, view.read_overlapping(*weight, {{-1, 0}, {2, 5}}));
  CHECK(test::value_of(view.read_overlapping(*weight, {{1, 1}, {0, 4}})).empty());
}

/// Makes `num_items` tensors, each in `rows` x `columns` shards of one element.
Manifest grid_manifest(int64_t num_items, int64_t rows, int64_t columns) {
  Manifest manifest = test::sample_manifest();
  const FileEntry file = manifest.files[0];
  manifest.items.clear();
  for (int64_t n = 0; n < num_items; ++n) {
    Item item;
    item.fqn = std::to_string(100000 + n);
    item.ordinal = static_cast<uint32_t>(n);
    item.is_tensor = true;
    item.tensor.dtype = tensor::DType::kUInt8;
    item.tensor.sizes = {rows, columns};
    for (int64_t shard = 0; shard < rows * columns; ++shard) {
      item.chunks.push_back({{{shard / columns, shard % columns}, {1, 1}},
                             {RecordKind::kTensor, tensor::DType::kUInt8, 0, 4096, 1000, 4160, 1}});
    }
    manifest.items.push_back(std::move(item));
  }
  return manifest;
}

TEST_CASE("manifest_view: of many blocks few are read, and each once") {
  const int64_t kItems = 4, kRows = 20000, kGridItems = 2000;
  const std::string long_file = encode_metadata_file(grid_manifest(kItems, kRows, 1));
  ManifestView view = test::value_of(open(long_file));
  REQUIRE(view.num_blocks() > 20);
  const auto found = test::value_of(view.find_item("100002"));
  const int64_t before = view.num_blocks_read();
  CHECK(before <= 5);
  for (int64_t row = 12345; row < 12349; ++row) {
    REQUIRE(test::value_of(view.read_overlapping(*found, {{row, 0}, {1, 1}})).size() == 1);
  }
  CHECK(view.num_blocks_read() - before <= 4);  // box and chunk, each on two blocks at worst
  REQUIRE(test::value_of(view.read_overlapping(*found, {{12340, 0}, {100, 1}})).size() == 100);
  CHECK(view.num_blocks_read() - before <= 4);

  const std::string grid_file = encode_metadata_file(grid_manifest(kGridItems, 10, 8));
  ManifestView grid = test::value_of(open(grid_file));
  REQUIRE(grid.num_blocks() > 40);
  for (int64_t n = 1000; n < 1016; ++n) {
    const auto item = test::value_of(grid.find_item(std::to_string(100000 + n)));
    REQUIRE(test::value_of(grid.read_overlapping(*item, {{3, 5}, {1, 1}})).size() == 1);
    REQUIRE(test::value_of(grid.read_overlapping(*item, {{3, 5}, {2, 3}})).size() == 6);
  }
  CHECK(grid.num_blocks_read() <= 10);
}

TEST_CASE("manifest_view: blocks come and go, more than are kept") {
  const std::string file = encode_metadata_file(grid_manifest(40, 10000, 1));
  ManifestView view = test::value_of(open(file));
  REQUIRE(view.num_blocks() > 100);
  for (int round = 0; round < 2; ++round) {
    for (int64_t n = 0; n < 40; ++n) {
      const auto found = test::value_of(view.find_item(std::to_string(100000 + n)));
      const auto chunks = test::value_of(view.read_overlapping(*found, {{9 * n, 0}, {1, 1}}));
      REQUIRE(chunks.size() == 1);
      REQUIRE(chunks[0].box.offsets[0] == 9 * n);
    }
  }
  CHECK(view.num_blocks_read() < 200);
}

TEST_CASE("manifest_view: a damaged block is noticed when it is used, by its place in the file") {
  const std::string good = encode_metadata_file(grid_manifest(4, 20000, 1));
  std::string file = good;
  const auto manifest = static_cast<int64_t>(test::value_of(pickle_part(good)).size());
  file[static_cast<size_t>(manifest + 9 * kBlockBytes + 77)] ^= 1;
  ManifestView view = test::value_of(open(file));
  int failed = 0;
  for (int64_t n = 0; n < 4; ++n) {
    const auto found = test::value_of(view.find_item(std::to_string(100000 + n)));
    for (int64_t row = 0; row < 20000; row += 500) {
      const auto chunks = view.read_overlapping(*found, {{row, 0}, {1, 1}});
      if (chunks.is_ok()) continue;
      ++failed;
      REQUIRE((chunks.status().code() == base::Code::kCorrupt));
      REQUIRE(test::contains(chunks.status().message(), "manifest block 9"));
      REQUIRE(chunks.status().offset() == manifest + 9 * kBlockBytes);
    }
  }
  CHECK(failed > 0);
  CHECK(failed < 40);
}

TEST_CASE("manifest_view: a reader's failure comes through, and the view goes on") {
  const std::string file = encode_metadata_file(test::sample_manifest());
  bool refuse = false;
  const ReadInto read = [&](int64_t offset, int64_t size, char* into) {
    if (refuse) return base::Status::make(base::Code::kStorage, "refused");
    return reader_of(file)(offset, size, into);
  };
  refuse = true;
  EXPECT_FAILURE(kStorage, "refused", ManifestView::open(static_cast<int64_t>(file.size()), read));
  refuse = false;
  const std::string large = encode_metadata_file(grid_manifest(2, 20000, 1));
  const ReadInto read_large = [&](int64_t offset, int64_t size, char* into) {
    if (refuse) return base::Status::make(base::Code::kStorage, "refused");
    return reader_of(large)(offset, size, into);
  };
  ManifestView view = test::value_of(ManifestView::open(static_cast<int64_t>(large.size()), read_large));
  const auto found = test::value_of(view.find_item("100001"));
  refuse = true;
  EXPECT_FAILURE(kStorage, "refused", view.read_overlapping(*found, {{15000, 0}, {1, 1}}));
  refuse = false;
  CHECK(test::value_of(view.read_overlapping(*found, {{15000, 0}, {1, 1}})).size() == 1);
}

TEST_CASE("manifest_view: no trailer, a cut file, a newer version, another save's manifest") {
  const std::string file = encode_metadata_file(test::sample_manifest());
  for (size_t size = 0; size < file.size(); size += 13) EXPECT_CODE(kNotFound, open(file.substr(0, size)));
  std::string table = file;
  table[table.size() - 129] ^= 1;
  EXPECT_FAILURE(kCorrupt, "block table", open(table));
  std::string newer = file;
  newer[newer.size() - 16] = 9;
  EXPECT_CODE(kVersion, open(newer));
}

/// A metadata file around `manifest` with correct checksums, as a hostile writer makes it.
std::string sealed(const std::string& manifest) {
  std::string file = manifest;
  std::vector<uint32_t> crcs;
  for (size_t begin = 0; begin < manifest.size(); begin += kBlockBytes) {
    const std::string_view block = std::string_view(manifest).substr(begin, kBlockBytes);
    crcs.push_back(base::crc32(0, block.data(), block.size()));
  }
  const std::string table = encode_block_table(crcs);
  file += table;
  // The trailer of a file of ours, with its lengths and checksums replaced.
  const std::string good = encode_metadata_file(test::sample_manifest());
  base::ByteWriter trailer(good.substr(good.size() - kMetadataTrailerBytes));
  trailer.put_u64(16, 0);
  trailer.put_u64(24, manifest.size());
  trailer.put_u64(32, crcs.size());
  trailer.put_u32(48, base::crc32(0, manifest.data(), manifest.size()));
  trailer.put_u32(52, base::crc32(0, table.data(), table.size()));
  trailer.put_u32(56, crc_without_field(trailer.bytes(), 56));
  return file + trailer.bytes();
}

/// Checks that what was returned has the properties that later code relies on.
void check_valid(ManifestView* view, const FoundItem& found, const std::vector<Chunk>& chunks) {
  const Item& item = found.item;
  REQUIRE((!item.is_tensor || tensor::find_dtype(item.tensor.dtype) != nullptr));
  REQUIRE(numel_of(item.tensor.sizes) >= 0);
  for (const Chunk& chunk : chunks) {
    const Record& record = chunk.record;
    REQUIRE(tensor::is_inside(chunk.box, item.tensor.sizes));
    REQUIRE((record.kind == RecordKind::kBytes) != item.is_tensor);
    REQUIRE(record.file < view->num_files());
    REQUIRE(record.offset >= kHeaderBytes);
    const auto file = view->read_file(record.file);
    if (file.is_ok()) {
      REQUIRE(record.bytes >= 0);
      REQUIRE(record.bytes <= file.value().bytes - record.offset);
      REQUIRE(is_data_file_name(file.value().name));
    }
    if (record.kind != RecordKind::kTensor) continue;
    const tensor::DTypeInfo* info = tensor::find_plain_dtype(record.stored_dtype);
    REQUIRE(info != nullptr);
    REQUIRE(numel_of(chunk.box.sizes) * info->itemsize_bytes == record.data_bytes);
    REQUIRE(record.data_offset >= record.offset);
    REQUIRE(record.data_offset + record.data_bytes <= record.offset + record.bytes);
  }
}

TEST_CASE("manifest_view: changed fields under right checksums never crash; what is accepted is valid") {
  test::Random random(22);
  int accepted = 0, refused = 0;
  for (int round = 0; round < test::rounds(20000); ++round) {
    Manifest drawn = test::sample_manifest();
    if (round % 2 == 0) {
      drawn = test::draw_manifest(&random, 4, 3);
      drawn.save_id = test::sample_manifest().save_id;
    }
    std::string bytes = encode_manifest(drawn);
    const uint64_t extremes[] = {
        0, 1, 8, 48, ~uint64_t{0} >> 1, uint64_t{1} << 63, ~uint64_t{0}, bytes.size(), 0xFFFFFFFFull, 1ull << 62};
    for (uint64_t changes = 1 + random() % 3; changes != 0; --changes) {
      // After magic, version and save id, which another test covers.
      const size_t at = 32 + (random() % ((bytes.size() - 32) / 4 - 2)) * 4;
      const uint64_t value = random() % 2 == 0 ? extremes[random() % 10] : random() % (2 * bytes.size());
      std::memcpy(&bytes[at], &value, random() % 2 == 0 ? 4 : 8);
    }
    const std::string file = sealed(bytes);
    auto view = open(file);
    if (!view.is_ok()) {
      ++refused;
      continue;
    }
    for (const Item& item : drawn.items) {
      const auto found = view.value().find_item(item.fqn);
      if (!found.is_ok() || !found.value().has_value()) continue;
      const Box whole = tensor::whole(found.value()->item.tensor.sizes);
      for (const Box& box : {whole, test::draw_box(&random, item.tensor.sizes)}) {
        const auto chunks = view.value().read_overlapping(*found.value(), box);
        if (!chunks.is_ok()) continue;
        ++accepted;
        check_valid(&view.value(), *found.value(), chunks.value());
      }
    }
  }
  CHECK(accepted > test::rounds(1000));
  CHECK(refused > test::rounds(100));
}

TEST_CASE("manifest_view: chunks that overlap: what is found covers the box, or is all there is") {
  test::Random random(23);
  for (int round = 0; round < test::rounds(500); ++round) {
    Manifest manifest = grid_manifest(1, 8, 1);
    Item& item = manifest.items[0];
    for (Chunk& chunk : item.chunks) {
      chunk.box.sizes[0] = test::draw(&random, 1, 8 - chunk.box.offsets[0]);
      chunk.record.data_bytes = chunk.box.sizes[0];
    }
    const std::string file = encode_metadata_file(manifest);
    ManifestView view = test::value_of(open(file));
    const auto found = test::value_of(view.find_item(item.fqn));
    const Box box = test::draw_box(&random, item.tensor.sizes);
    const auto got = test::value_of(view.read_overlapping(*found, box));
    int64_t covered = 0;
    for (const Chunk& chunk : got) {
      Box common;
      REQUIRE(tensor::intersect(chunk.box, box, &common));
      covered += numel_of(common.sizes);
    }
    REQUIRE((covered == numel_of(box.sizes) || got.size() == overlapping(item, box).size()));
  }
}

}  // namespace
}  // namespace bytecheckpoint::format
