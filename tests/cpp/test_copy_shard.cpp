// SPDX-License-Identifier: Apache-2.0
#include "csrc/engine/export/copy_shard.h"

#include <string>
#include <vector>

#include "csrc/base/crc32.h"
#include "csrc/engine/commit/assemble.h"
#include "csrc/engine/open/open_safetensors.h"
#include "csrc/format/torch/torch_archive.h"
#include "tests/cpp/expect.h"
#include "tests/cpp/temp_dir.h"

namespace bytecheckpoint::engine {
namespace {

using tensor::DType;
using test::TempDir;

constexpr int64_t kRows = 3000, kColumns = 4001;

uint8_t value(int64_t i) {
  return static_cast<uint8_t>(i * 37 + i / 991);
}

/// Returns bytes [first, first + count) of the source.
std::string values(int64_t first, size_t count) {
  std::string bytes(count, '\0');
  for (size_t i = 0; i < count; ++i) bytes[i] = static_cast<char>(value(first + static_cast<int64_t>(i)));
  return bytes;
}

/// A large tensor `w`, and the small ones `a` and `b`.
std::shared_ptr<const format::Manifest> write_source(const TempDir& dir) {
  const std::string json = base::text(R"({"w":{"dtype":"U8","shape":[3000,4001],"data_offsets":[0,12003000]},)",
                                      R"("a":{"dtype":"U8","shape":[],"data_offsets":[12003000,12003001]},)",
                                      R"("b":{"dtype":"U8","shape":[0,3],"data_offsets":[12003001,12003001]}})");
  base::ByteWriter out;
  out.u64(json.size());
  out.raw(json);
  test::write_all(dir / "model.safetensors", out.take() + values(0, kRows * kColumns + 1));
  return std::make_shared<format::Manifest>(test::value_of(open_safetensors(dir.path())));
}

CopyOptions options_for(const TempDir& from, const TempDir& to) {
  CopyOptions options;
  options.reading.directory = from.path();
  options.saving.directory = to.path();
  options.progress = [](int64_t) { return true; };
  return options;
}

RowsToCopy rows(const char* fqn, int64_t first, int64_t count) {
  return {{fqn, DType::kUInt8}, first, count};
}

TEST_CASE("copy: chunks of rows, small tensors together, in files of ours and in plain ones") {
  const TempDir from;
  const auto source = write_source(from);
  const std::vector<ShardToCopy> shards{{{rows("a", 0, 1), rows("b", 0, 0), rows("w", 0, 1000)}, {}},
                                        {{rows("w", 1000, 2000)}, {}}};
  for (const bool is_plain : {false, true}) {
    const TempDir to;
    CopyOptions options = options_for(from, to);
    options.saving.is_plain = is_plain;
    int64_t told = 0;
    options.progress = [&](int64_t done) {
      CHECK(done >= told);
      told = done;
      return true;
    };
    std::vector<format::WriteResult> written;
    for (size_t s = 0; s < shards.size(); ++s) {
      told = 0;
      options.saving.rank = static_cast<uint32_t>(s);
      written.push_back(test::value_of(copy_shard(options, source, nullptr, shards[s])));
    }
    CHECK(told == 2000 * kColumns);
    const format::Manifest copied =
        test::value_of(assemble_manifest(test::value_of(plan_copy(*source, shards)), written));
    REQUIRE(copied.items.size() == 3);
    CHECK(copied.find("w")->chunks.size() == 2);
    CHECK(copied.find("w")->ordinal == 2);
    for (const char* fqn : {"a", "w"}) {
      int64_t at = fqn[0] == 'a' ? kRows * kColumns : 0;
      for (const format::Chunk& chunk : copied.find(fqn)->chunks) {
        const std::string file = test::read_all(to / copied.files[chunk.record.file].name);
        CHECK((file.substr(0, 4) == "PK\3\4") == is_plain);
        const std::string data =
            file.substr(static_cast<size_t>(chunk.record.data_offset), static_cast<size_t>(chunk.record.data_bytes));
        REQUIRE((data == values(at, data.size())));
        at += static_cast<int64_t>(data.size());
        const auto read = [&](int64_t offset, int64_t size) -> base::Result<std::string> {
          return file.substr(static_cast<size_t>(chunk.record.offset + offset), static_cast<size_t>(size));
        };
        const auto archive = test::value_of(format::read_tensor_archive(chunk.record.bytes, read));
        CHECK(archive->storage_crc == base::crc32(0, data.data(), data.size()));
      }
    }
  }
}

TEST_CASE("copy: rows that are not there, a key that is not there, interruption") {
  const TempDir from, to;
  const auto source = write_source(from);
  CopyOptions options = options_for(from, to);
  EXPECT_FAILURE(kInvalidArgument, "'w': 2 rows from 2999 on",
                 copy_shard(options, source, nullptr, {{rows("w", 2999, 2)}, {}}));
  EXPECT_FAILURE(kInvalidArgument, "no such tensor", copy_shard(options, source, nullptr, {{rows("x", 0, 1)}, {}}));
  EXPECT_FAILURE(kInvalidArgument, "no such item", copy_shard(options, source, nullptr, {{}, {"x"}}));
  EXPECT_FAILURE(kInvalidArgument, "'x'", plan_copy(*source, {{{}, {"x"}}}));
  options.progress = [](int64_t done) { return done == 0; };
  EXPECT_CODE(kCancelled, copy_shard(options, source, nullptr, {{rows("w", 0, kRows)}, {}}));
}

}  // namespace
}  // namespace bytecheckpoint::engine
