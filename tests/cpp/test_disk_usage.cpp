// SPDX-License-Identifier: Apache-2.0
#include "csrc/format/manifest/disk_usage.h"

#include <string>

#include "tests/cpp/expect.h"
#include "tests/cpp/sample_manifest.h"

namespace bytecheckpoint::format {
namespace {

using tensor::DType;

int64_t sum_of(const DiskUsage& usage) {
  int64_t sum = usage.header_bytes + usage.table_bytes + usage.archive_bytes + usage.padding_bytes;
  for (const UsageRow& row : usage.rows) sum += row.bytes;
  return sum;
}

/// Returns the rows as text: key, code of the dtype, items, bytes.
std::string text_of(const DiskUsage& usage) {
  std::string out;
  for (const UsageRow& row : usage.rows) {
    out += base::text(row.key, " ", static_cast<int>(row.dtype), " ", row.num_items, " ", row.bytes, "\n");
  }
  return out;
}

TEST_CASE("disk usage: rows by the first names of a key, and everything adds up to the size of the files") {
  const Manifest manifest = test::sample_manifest();
  CHECK(text_of(disk_usage(manifest, 1)) ==
        "extra 0 1 100\n"
        "layer 2 2 540\n"  // an opaque record of 500 bytes, and two chunks of 20
        "layer 5 1 0\n"
        "layer\xC3\xA9 1 1 8\n");
  CHECK(text_of(disk_usage(manifest, 0)) == " 0 1 100\n 1 1 8\n 2 2 540\n 5 1 0\n");
  CHECK(disk_usage(manifest, 2).rows.size() == 5);
  CHECK(text_of(disk_usage(manifest, 9)) == text_of(disk_usage(manifest, 2)));
  const DiskUsage usage = disk_usage(manifest, 1);
  CHECK(sum_of(usage) == 2 * (1 << 20));
  CHECK(usage.header_bytes == 2 * (4096 + 80));
  CHECK(usage.table_bytes == 2 * 4 * 4);
  CHECK(usage.archive_bytes == 900 + 2 * 980 + 992);
}

TEST_CASE("disk usage: block tables of files of all sizes") {
  for (const int64_t end : {int64_t{4096}, kBlockBytes - 64, kBlockBytes, kBlockBytes + 64, 7 * kBlockBytes,
                            65536 * kBlockBytes, 65537 * kBlockBytes - 64, 200000 * kBlockBytes + 128}) {
    DataTrailer trailer;
    trailer.end_of_records = end;
    trailer.num_blocks = num_blocks_of(end);
    Manifest manifest;
    manifest.files.emplace_back().bytes = trailer.file_bytes();
    const DiskUsage usage = disk_usage(manifest, 1);
    CHECK(usage.table_bytes == trailer.table_bytes());
    CHECK(usage.padding_bytes == end - kHeaderBytes);
  }
}

TEST_CASE("disk usage: bytes that items of another writer share count once") {
  Manifest manifest;
  manifest.foreign.emplace();
  manifest.files.resize(1);
  const auto add = [&](const char* fqn, RecordKind kind, int64_t offset, int64_t bytes) {
    Item item;
    item.fqn = fqn;
    item.is_tensor = true;
    item.tensor.dtype = DType::kFloat32;
    item.tensor.sizes = {10};
    item.chunks.push_back({tensor::whole({10}), {kind, DType::kFloat32, 0, offset, bytes, offset, bytes}});
    manifest.items.push_back(item);
  };
  add("embed", RecordKind::kTensor, 100, 40);
  add("empty", RecordKind::kTensor, 200, 0);  // stands where the next one begins
  add("head", RecordKind::kTensor, 100, 40);
  add("norm", RecordKind::kTensor, 200, 40);
  add("stock", RecordKind::kForeign, 300, 1000);
  add("unknown", RecordKind::kAbsent, 0, 0);
  add("wide", RecordKind::kForeign, 2000, 30);  // of repeated elements: fewer are stored
  const DiskUsage usage = disk_usage(manifest, 1);
  CHECK(text_of(usage) ==
        "embed 2 1 40\nempty 2 1 0\nhead 2 1 0\nnorm 2 1 40\nstock 2 1 40\nunknown 2 1 0\nwide 2 1 30\n");
  CHECK(usage.archive_bytes == 960);
  CHECK(usage.header_bytes + usage.table_bytes + usage.padding_bytes == 0);
}

TEST_CASE("disk usage: sizes that no file has overflow nothing") {
  Manifest manifest = test::sample_manifest();
  for (FileEntry& file : manifest.files) file.bytes = INT64_MAX;
  for (Item& item : manifest.items) {
    for (Chunk& chunk : item.chunks) chunk.record.bytes = INT64_MAX - chunk.record.offset;
  }
  CHECK(disk_usage(manifest, 1).archive_bytes == INT64_MAX);
  for (FileEntry& file : manifest.files) file.bytes = 0;
  CHECK(disk_usage(manifest, 1).padding_bytes == 0);
}

}  // namespace
}  // namespace bytecheckpoint::format
