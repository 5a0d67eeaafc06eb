// SPDX-License-Identifier: Apache-2.0
#include "csrc/engine/memory_load.h"

#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "tests/cpp/saved_tensors.h"

// test_save_load_job.cpp has the tests that hold for every load, and runs them on a file system in memory, too.

namespace bytecheckpoint::engine {
namespace {

TEST_CASE("memory_load: of two tensors that are loaded to one memory, one counts as a whole") {
  const TempDir dir(each_root());
  std::vector<Saved> tensors = {sample_tensors()[4], sample_tensors()[4]};
  tensors[0].fqn = "a";
  tensors[1].fqn = "b";
  for (char& byte : tensors[1].memory) byte = static_cast<char>(~byte);
  const format::Manifest manifest = save(dir, &tensors, test::save_options(dir.path()));
  for (int round = 0; round < 5; ++round) {
    LoadOptions options = load_options(dir.path());
    options.num_io_threads = 2;
    LoadJob job(options, manifest);
    std::string memory(tensors[0].memory.size(), '\xEE');
    for (const char* name : {"a", "b"}) {
      const format::Item* item = manifest.find(name);
      EXPECT_OK(job.destinations().add_tensor(
          name, item->chunks[0], place_of(item->chunks[0]), tensor::whole(tensors[0].sizes),
          {reinterpret_cast<uint8_t*>(memory.data()), DType::kUInt8, tensors[0].sizes, {1}}));
    }
    CHECK_FALSE(job.destinations().is_plain());
    EXPECT_OK(job.run(kNever));
    CHECK((memory == tensors[0].memory || memory == tensors[1].memory));
  }
}

TEST_CASE("memory_load: tensors far smaller than a block come back, each with its own bytes") {
  const TempDir dir(each_root());
  std::vector<Saved> tensors;
  for (int t = 0; t < 3000; ++t) {
    const Dims sizes = {1 + t % 700};
    tensors.push_back({base::text("t", t),
                       DType::kFloat32,
                       sizes,
                       {4},
                       test::patterned(bytes_of(sizes, DType::kFloat32), static_cast<uint32_t>(t))});
  }
  const format::Manifest manifest = save(dir, &tensors, test::save_options(dir.path()));
  LoadOptions options = load_options(dir.path());
  options.num_io_threads = 3;
  LoadJob job(options, manifest);
  std::vector<std::string> loaded(tensors.size());
  for (size_t t = 0; t < tensors.size(); ++t) {
    add(&job, manifest, tensors[t].fqn, tensor::whole(tensors[t].sizes), &loaded[t]);
  }
  CHECK(job.destinations().is_plain());
  EXPECT_OK(job.run(kNever));
  for (size_t t = 0; t < tensors.size(); ++t) REQUIRE((loaded[t] == tensors[t].memory));
}

TEST_CASE("memory_load: memory counts as filled twice only where it may be") {
  const TempDir dir;
  std::vector<Saved> tensors = {sample_tensors()[3]};  // 1031 x 517 bfloat16
  const format::Manifest manifest = save(dir, &tensors, test::save_options(dir.path()));
  const format::Chunk& chunk = manifest.find("above_1_mib")->chunks[0];
  std::string memory(4 << 20, '\0');
  const auto is_plain_with = [&](std::vector<std::pair<int64_t, int64_t>> begins_and_strides) {
    LoadJob job(load_options(dir.path()), manifest);
    for (const auto& [begin, stride] : begins_and_strides) {
      EXPECT_OK(job.destinations().add_tensor(
          "above_1_mib", chunk, place_of(chunk), {{0, 0}, {100, 10}},
          {reinterpret_cast<uint8_t*>(memory.data()) + begin, DType::kBFloat16, {100, 10}, {stride, 2}}));
    }
    return job.destinations().is_plain();
  };
  CHECK(is_plain_with({}));
  CHECK(is_plain_with({{0, 20}, {2000, 20}, {4000, 20}}));
  CHECK(is_plain_with({{3980, -20}, {0, 20}}));        // the first one ends at 2000, downwards
  CHECK_FALSE(is_plain_with({{3979, -20}, {0, 20}}));  // one byte of it lies in the second one
  CHECK_FALSE(is_plain_with({{0, 20}, {1999, 20}}));
  CHECK_FALSE(is_plain_with({{0, 40}, {20, 40}}));  // they interleave
  CHECK_FALSE(is_plain_with({{0, 0}, {0, 20}}));
}

}  // namespace
}  // namespace bytecheckpoint::engine
