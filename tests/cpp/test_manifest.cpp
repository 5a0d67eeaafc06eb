// SPDX-License-Identifier: Apache-2.0
#include "csrc/format/manifest/manifest.h"

#include <cstring>
#include <random>
#include <string>

#include "tests/cpp/expect.h"
#include "tests/cpp/sample_manifest.h"

namespace bytecheckpoint::format {
namespace {

/// The properties that later code relies on without checking again.
bool is_valid(const Manifest& manifest) {
  for (size_t i = 0; i < manifest.items.size(); ++i) {
    const Item& item = manifest.items[i];
    if (i != 0 && !(manifest.items[i - 1].fqn < item.fqn)) return false;
    if (item.is_tensor && tensor::find_dtype(item.tensor.dtype) == nullptr) return false;
    if (!item.is_tensor && item.chunks.size() != 1) return false;
    for (const Chunk& chunk : item.chunks) {
      const Record& record = chunk.record;
      if (!tensor::is_inside(chunk.box, item.tensor.sizes) || record.file >= manifest.files.size()) return false;
      const int64_t file_bytes = manifest.files[record.file].bytes;
      if (record.offset < kHeaderBytes || record.bytes < 0 || record.bytes > file_bytes - record.offset) return false;
      if ((record.kind == RecordKind::kBytes) == item.is_tensor) return false;
      if (record.kind != RecordKind::kTensor) continue;
      const tensor::DTypeInfo* info = tensor::find_dtype(record.stored_dtype);
      int64_t numel = 0;
      if (info == nullptr || !tensor::checked_numel(chunk.box.sizes, &numel)) return false;
      if (numel * info->itemsize_bytes != record.data_bytes || record.data_offset < record.offset) return false;
      if (record.data_offset + record.data_bytes > record.offset + record.bytes) return false;
    }
  }
  for (const FileEntry& file : manifest.files) {
    if (!is_data_file_name(file.name)) return false;
  }
  return true;
}

TEST_CASE("manifest: what was encoded comes back, to the byte") {
  const Manifest manifest = test::sample_manifest();
  const std::string bytes = encode_manifest(manifest);
  const Manifest back = test::value_of(decode_manifest(bytes));
  CHECK(encode_manifest(back) == bytes);
  CHECK(is_valid(back));
  CHECK(back.save_id == manifest.save_id);
  CHECK(back.checkpoint_id == manifest.checkpoint_id);
  CHECK(back.user_metadata == manifest.user_metadata);
  CHECK(back.planner_data == manifest.planner_data);
  REQUIRE(back.items.size() == 5);
  const Item& weight = back.items[3];
  CHECK(weight.fqn == "layer.weight");
  CHECK(weight.is_tensor);
  CHECK(weight.tensor.requires_grad);
  CHECK_FALSE(weight.tensor.pin_memory);
  CHECK(weight.tensor.memory_format == 2);
  CHECK((weight.tensor.dtype == tensor::DType::kFloat32));
  REQUIRE(weight.chunks.size() == 2);
  CHECK((weight.chunks[1].box == tensor::Box{{2, 0}, {2, 5}}));
  CHECK((weight.chunks[1].record.stored_dtype == tensor::DType::kBFloat16));
  CHECK(weight.chunks[1].record.file == 1);
  CHECK(back.items[4].tensor.pin_memory);
  CHECK(back.items[0].ordinal == 3);
  REQUIRE(back.files.size() == 2);
  CHECK(back.files[1].id.rank == 1);
  CHECK(back.files[1].trailer_crc == 78);
}

TEST_CASE("manifest: one without anything in it comes back") {
  const Manifest back = test::value_of(decode_manifest(encode_manifest(Manifest{})));
  CHECK(back.items.empty());
  CHECK(back.files.empty());
  CHECK((back.planner_data.kind() == Tree::Kind::kNone));
}

TEST_CASE("manifest: found by name, by the bytes of UTF-8") {
  const Manifest manifest = test::sample_manifest();
  for (const Item& item : manifest.items) CHECK(manifest.find(item.fqn) == &item);
  for (const char* absent : {"", "a", "layer", "layer.weigh", "layer.weight0", "zzz"})
    CHECK(manifest.find(absent) == nullptr);
  CHECK(Manifest{}.find("x") == nullptr);
}

TEST_CASE("manifest: cut at any byte it is corrupt, or what was cut off said nothing") {
  const std::string bytes = encode_manifest(test::sample_manifest());
  for (size_t size = 0; size < bytes.size(); ++size) {
    const std::string cut = bytes.substr(0, size);  // on the heap, so the sanitizer notices a read past its end
    EXPECT_CODE(kCorrupt, decode_manifest(cut));
  }
}

TEST_CASE("manifest: every byte changed in every bit never crashes, and what is accepted is valid") {
  const std::string good = encode_manifest(test::sample_manifest());
  int accepted = 0;
  for (size_t bit = 0; bit < 8 * good.size(); ++bit) {
    std::string bytes = good;
    bytes[bit / 8] = static_cast<char>(bytes[bit / 8] ^ (1 << bit % 8));
    const auto manifest = decode_manifest(bytes);
    if (manifest.is_ok()) {
      ++accepted;
      REQUIRE(is_valid(manifest.value()));
    } else {
      const base::Code code = manifest.status().code();
      REQUIRE((code == base::Code::kCorrupt || code == base::Code::kVersion));
    }
  }
  CHECK(accepted > 0);  // this layer cannot notice a changed letter of a name
}

TEST_CASE("manifest: many changed fields never crash, and what is accepted is valid") {
  const std::string good = encode_manifest(test::sample_manifest());
  std::mt19937_64 random(13);
  const uint64_t extremes[] = {
      0, 1, 8, 48, 0x7FFFFFFFFFFFFFFFull, 0x8000000000000000ull, ~uint64_t{0}, good.size(), 0xFFFFFFFFull, 1ull << 62};
  for (int round = 0; round < 30000; ++round) {
    std::string bytes = good;
    for (uint64_t changes = 1 + random() % 4; changes != 0; --changes) {
      if (random() % 2 == 0) {
        bytes[random() % bytes.size()] = static_cast<char>(random());
      } else {
        const size_t at = (random() % (bytes.size() / 4 - 1)) * 4;
        const uint64_t value = random() % 2 == 0 ? extremes[random() % 10] : random() % (2 * good.size());
        std::memcpy(&bytes[at], &value, random() % 2 == 0 ? 4 : 8);
      }
    }
    const auto manifest = decode_manifest(bytes);
    if (manifest.is_ok()) REQUIRE(is_valid(manifest.value()));
  }
}

TEST_CASE("manifest: a newer version is told from damage") {
  std::string bytes = encode_manifest(test::sample_manifest());
  bytes[8] = 9;
  EXPECT_FAILURE(kVersion, "version 9", decode_manifest(bytes));
}

TEST_CASE("manifest: items that are partial on purpose make it version 2, and only they do") {
  Manifest manifest = test::sample_manifest();
  std::string bytes = encode_manifest(manifest);
  REQUIRE(bytes[8] == 1);
  Item& weight = manifest.items[3];
  REQUIRE(weight.fqn == "layer.weight");
  weight.is_partial = true;
  weight.chunks.pop_back();
  bytes = encode_manifest(manifest);
  CHECK(bytes[8] == 2);
  const Manifest read = test::value_of(decode_manifest(bytes));
  for (const Item& item : read.items) CHECK(item.is_partial == (item.fqn == "layer.weight"));
  CHECK(read.find("layer.weight")->tensor.requires_grad);
  CHECK(encode_manifest(read) == bytes);
  bytes[8] = 1;
  EXPECT_FAILURE(kCorrupt, "item 'layer.weight': is partial, but a manifest of version 1", decode_manifest(bytes));
  bytes[8] = 3;
  EXPECT_FAILURE(kVersion, "version 3, this build reads up to 2", decode_manifest(bytes));
}

TEST_CASE("manifest: names, boxes and ranges that point outside are refused by name") {
  const auto refused = [](auto&& change, const char* part) {
    Manifest manifest = test::sample_manifest();
    change(&manifest);
    EXPECT_FAILURE(kCorrupt, part, decode_manifest(encode_manifest(manifest)));
  };
  refused([](Manifest* m) { m->files[0].name = "../../etc/passwd"; }, "the name does not match its id");
  refused([](Manifest* m) { m->files[0].bytes = 10; }, "impossible size");
  refused([](Manifest* m) { m->items[3].chunks[0].box.sizes[0] = 5; }, "layer.weight");
  refused([](Manifest* m) { m->items[3].chunks[0].record.file = 2; }, "not listed");
  refused([](Manifest* m) { m->items[3].chunks[0].record.offset = 0; }, "outside its file");
  refused([](Manifest* m) { m->items[3].chunks[0].record.bytes = 1 << 20; }, "outside its file");
  refused([](Manifest* m) { m->items[3].chunks[0].record.bytes = -1; }, "outside its file");
  refused([](Manifest* m) { m->items[3].chunks[0].record.data_bytes = 21; }, "do not have the length of their shape");
  refused([](Manifest* m) { m->items[3].chunks[0].record.data_offset = 4680; }, "data are outside");
  refused([](Manifest* m) { m->items[3].chunks[0].record.kind = RecordKind::kBytes; }, "wrong kind");
  refused([](Manifest* m) { m->items[3].tensor.dtype = tensor::DType::kNone; }, "unknown dtype");
  refused([](Manifest* m) { m->items[3].tensor.sizes[0] = -4; }, "impossible shape");
  refused([](Manifest* m) { m->items[0].chunks.clear(); }, "unknown kind");
  refused([](Manifest* m) { m->items[1].fqn = "extra"; }, "out of order");
  refused([](Manifest* m) { std::swap(m->items[0], m->items[1]); }, "out of order");
  refused([](Manifest* m) { m->items[1].ordinal = m->items[0].ordinal; }, "not a permutation");
  refused([](Manifest* m) { m->items.back().fqn = "\xff"; }, "not UTF-8");
  refused([](Manifest* m) { m->checkpoint_id = "\xff"; }, "not UTF-8");
}

TEST_CASE("manifest: names may not share bytes, which would make a small file fill the memory") {
  Manifest manifest;
  for (const char* fqn : {"a", "ab"}) {
    Item item;
    item.fqn = fqn;
    item.ordinal = static_cast<uint32_t>(manifest.items.size());
    item.is_tensor = true;
    item.tensor.dtype = tensor::DType::kUInt8;
    item.tensor.sizes = {0};
    manifest.items.push_back(std::move(item));
  }
  std::string bytes = encode_manifest(manifest);
  EXPECT_OK(decode_manifest(bytes));
  uint64_t items_offset;
  std::memcpy(&items_offset, &bytes[32 + 16], sizeof items_offset);
  // The second name begins where the first one begins.
  const uint64_t shared = 0;
  std::memcpy(&bytes[items_offset + 48], &shared, sizeof shared);
  EXPECT_CODE(kCorrupt, decode_manifest(bytes));
}

}  // namespace
}  // namespace bytecheckpoint::format
