// SPDX-License-Identifier: Apache-2.0
#include "csrc/engine/load/memory_load.h"

#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "tests/cpp/saved_tensors.h"

// test_save_load_job.cpp has the tests that hold for every load, and runs them on a file system in memory, too.

namespace bytecheckpoint::engine {
namespace {

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

}  // namespace
}  // namespace bytecheckpoint::engine
