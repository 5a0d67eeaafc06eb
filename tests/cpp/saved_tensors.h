// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <string>
#include <utility>
#include <vector>

#include "csrc/engine/load/load_job.h"
#include "csrc/engine/open/open_checkpoint.h"
#include "tests/cpp/aligned_bytes.h"
#include "tests/cpp/random_box.h"
#include "tests/cpp/saved_checkpoint.h"
#include "tests/cpp/temp_dir.h"

// Tensors that are saved to a real directory, and loads of them, for the tests of `SaveJob` and `LoadJob`.

namespace bytecheckpoint::engine {

using tensor::Box;
using tensor::Dims;
using tensor::DType;
using test::SaveItem;
using test::TempDir;

inline const auto kNever = [] { return false; };

/// Makes doctest run the test case twice: a load from a file system in memory is another one than from a disk.
inline const char* each_root() {
  const char* root = nullptr;
  SUBCASE("on a disk") {}
  SUBCASE("in memory") {
    root = test::memory_root();
  }
  return root;
}

inline LoadOptions load_options(const std::string& directory, bool direct_io = true) {
  LoadOptions options;
  options.directory = directory;
  options.direct_io = direct_io;
  options.ring_bytes = 16 << 20;
  options.io_timeout_s = 60;
  return options;
}

inline Dims contiguous_strides(const Dims& sizes, int64_t itemsize) {
  Dims strides = tensor::row_major_strides(sizes);
  for (int64_t& stride : strides) stride *= itemsize;
  return strides;
}

inline int64_t bytes_of(const Dims& sizes, DType dtype) {
  int64_t numel = 0;
  REQUIRE(tensor::checked_numel(sizes, &numel));
  return numel * tensor::find_dtype(dtype)->itemsize_bytes;
}

/// A tensor that is saved whole. It has its own memory, whose layout `strides_bytes` gives.
struct Saved {
  std::string fqn;
  DType dtype;
  Dims sizes;
  Dims strides_bytes;
  std::string memory;

  SaveItem item() {
    return {
        fqn, sizes, tensor::whole(sizes), {reinterpret_cast<uint8_t*>(memory.data()), dtype, sizes, strides_bytes}, {}};
  }
  /// Row-major bytes of `box`.
  std::string expected(const Box& box) const {
    const int64_t itemsize = tensor::find_dtype(dtype)->itemsize_bytes;
    Dims firsts = box.sizes;  // of runs
    int64_t run_bytes = itemsize;
    if (!firsts.empty() && strides_bytes.back() == itemsize && firsts.back() > 0) {
      run_bytes *= firsts.back();
      firsts.back() = 1;
    }
    std::string out;
    test::for_each_index(firsts, [&](const Dims& index) {
      const int64_t at = test::dot(index, strides_bytes) + test::dot(box.offsets, strides_bytes);
      out.append(memory, static_cast<size_t>(at), static_cast<size_t>(run_bytes));
    });
    return out;
  }
};

inline std::vector<Saved> sample_tensors() {
  const auto contiguous = [](std::string fqn, DType dtype, Dims sizes) {
    const int64_t itemsize = tensor::find_dtype(dtype)->itemsize_bytes;
    return Saved{std::move(fqn), dtype, sizes, contiguous_strides(sizes, itemsize),
                 test::patterned(bytes_of(sizes, dtype), static_cast<uint32_t>(sizes.size()))};
  };
  std::vector<Saved> tensors = {
      contiguous("contiguous", DType::kFloat32, {13, 7, 5}),
      contiguous("empty", DType::kInt64, {3, 0, 2}),
      contiguous("scalar", DType::kComplex128, {}),
      contiguous("above_1_mib", DType::kBFloat16, {1031, 517}),
      contiguous("of_several_slots", DType::kUInt8, {(18 << 20) + 7}),
      {"transposed", DType::kFloat64, {300, 200}, {8, 2400}, test::patterned(300 * 200 * 8)},
      {"expanded", DType::kInt16, {4, 1000, 3}, {0, 2, 0}, test::patterned(2000)},
      {"every_other", DType::kInt32, {70000}, {8}, test::patterned(70000 * 8)},
  };
  return tensors;
}

/// Saves, assembles, commits and opens a checkpoint. Returns its manifest.
inline format::Manifest save(const TempDir& dir, std::vector<Saved>* tensors, SaveOptions options, uint8_t number = 1) {
  std::vector<SaveItem> items;
  for (Saved& tensor : *tensors) items.push_back(tensor.item());
  items.push_back(test::bytes_item(test::patterned(300001)));
  auto commit = test::value_of(Commit::begin(test::commit_options(dir.path(), number)));
  const format::WriteResult result = test::value_of(test::write_items(items, std::move(options)));
  const format::WriteResult received = test::value_of(format::decode_write_result(format::encode_write_result(result)));
  const format::Manifest manifest =
      test::value_of(assemble_manifest(test::planned(items, test::save_id_of(number)), {received}));
  EXPECT_OK(commit->check_files(manifest.files));
  EXPECT_OK(commit->commit(format::encode_metadata_file(manifest), manifest.files, manifest.save_id));
  return test::value_of(open_checkpoint(dir.path(), {{}, /*check_pickle=*/true}));
}

/// Adds a load of `box` of `fqn` into `*out`, contiguous.
inline void add(LoadJob* job, const format::Manifest& manifest, const std::string& fqn, const Box& box,
                std::string* out) {
  const format::Item* item = manifest.find(fqn);
  REQUIRE(item != nullptr);
  const DType dtype = item->tensor.dtype;
  out->assign(static_cast<size_t>(bytes_of(box.sizes, dtype)), '\xEE');
  EXPECT_OK(job->destinations().add_tensor(fqn, item->chunks[0], place_of(item->chunks[0]), box,
                                           {reinterpret_cast<uint8_t*>(out->data()), dtype, box.sizes,
                                            contiguous_strides(box.sizes, tensor::find_dtype(dtype)->itemsize_bytes)}));
}

}  // namespace bytecheckpoint::engine
