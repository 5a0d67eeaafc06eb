// SPDX-License-Identifier: Apache-2.0
// Tests saves and loads of tensors on a device, with a stand-in for it: every byte, and its order with the caller's
// stream.
#include <doctest/doctest.h>

#include <algorithm>
#include <cstring>
#include <deque>
#include <string>
#include <utility>
#include <vector>

#include "csrc/staging/device_copies.h"
#include "tests/cpp/device_memory.h"
#include "tests/cpp/saved_tensors.h"
#include "tests/cuda/cuda_on_host.h"

namespace bytecheckpoint::engine {
namespace {

namespace cuda = test::cuda_on_host;
using base::Code;
using test::draw;
using test::Random;
using test::SampleTensor;

constexpr int kDevice = 0;
constexpr int kOtherDevice = 1;  // whose tensors stand in the same slots

/// Device memory, which its user fills, and may spoil as soon as it was copied.
struct Sample {
  Sample(Random* random, std::string fqn, const Dims& sizes, int64_t itemsize)
      : fqn(std::move(fqn)),
        tensor(random, sizes, itemsize, /*expand=*/false),
        device(static_cast<int>(draw(random, staging::kHost, kOtherDevice))),
        wanted(tensor.packed()),
        box(tensor::whole(sizes)) {}

  void write(const std::vector<uint8_t>& packed) {
    const std::vector<uint8_t> block = tensor.block_with(packed);
    std::memcpy(const_cast<uint8_t*>(tensor.block().data()), block.data(), block.size());
  }
  void spoil(uint8_t value) { write(std::vector<uint8_t>(wanted.size(), value)); }

  std::string fqn;
  SampleTensor tensor;
  int device;
  std::vector<uint8_t> wanted;  // row-major
  Box box;
};

/// Both devices, with one stream of the caller: the stand-in's streams are of no device.
void use_devices(staging::DeviceCopies* copies, cuda::CallerStream* caller) {
  for (const int device : {kDevice, kOtherDevice}) REQUIRE(test::value_of(copies->use(device, caller->handle())));
}

std::deque<Sample> draw_samples(Random* random) {
  std::deque<Sample> samples;
  const auto name = [&] { return "t" + std::to_string(samples.size()); };
  const auto add_small = [&] {
    for (int64_t left = draw(random, 0, 30); left > 0; --left) {
      samples.emplace_back(random, name(), test::draw_sizes(random, 4, 12), int64_t{1} << draw(random, 0, 4));
    }
  };
  // The large ones cross slots, also within a row.
  add_small();
  samples.emplace_back(random, name(), Dims{3, 5, draw(random, 100000, 200000)}, 4);
  add_small();
  samples.emplace_back(random, name(), Dims{draw(random, 1, 5 << 20)}, 2);
  add_small();
  return samples;
}

SaveOptions draw_options(Random* random, const TempDir& dir) {
  SaveOptions options = test::save_options(dir.path());
  options.direct_io = draw(random, 0, 3) != 0;
  options.num_io_threads = static_cast<int>(draw(random, 1, 2));
  options.ring_bytes = draw(random, 2, 4) * staging::kSlotBytes;
  options.one_file_a_record = draw(random, 0, 3) == 0;
  options.max_file_bytes = draw(random, 0, 2) == 0 ? 32 << 20 : 0;
  options.niceness = draw(random, 0, 1) == 0 ? 0 : 1;
  return options;
}

/// A job with a timeout gives its ring back in a thread of its own, when its test may be over.
LoadOptions options_of_load(const TempDir& dir, bool direct_io = true) {
  LoadOptions options = load_options(dir.path(), direct_io);
  options.io_timeout_s = 0;
  return options;
}

/// Gives back what the process keeps for later saves.
void free_all() {
  staging::BorrowedRing::free_idle();
  staging::SharedDeviceMerge::drop_all();
}

/// Saves samples, in one call or several, while the caller's stream has still to write them.
base::Result<format::WriteResult> write_samples(Random* random, std::deque<Sample>* samples, const SaveOptions& options,
                                                cuda::CallerStream* caller) {
  staging::DeviceCopies copies;
  use_devices(&copies, caller);
  BCP_ASSIGN_OR_RETURN(const auto job, SaveJob::start(options));
  for (size_t first = 0, behind = 0; first < samples->size(); first = behind) {
    behind = std::min(samples->size(), first + static_cast<size_t>(draw(random, 1, 80)));
    std::vector<TensorToWrite> tensors;
    for (size_t s = first; s < behind; ++s) {
      Sample& sample = (*samples)[s];
      tensors.push_back({&sample.fqn, &sample.box, sample.tensor.view(), sample.device});
      if (sample.device == staging::kHost) continue;
      sample.spoil(0xAA);
      caller->enqueue([&sample] { sample.write(sample.wanted); });
    }
    base::Status appended = job->append_tensors(tensors, &copies);
    caller->synchronize();
    BCP_RETURN_IF_ERROR(appended);
    for (size_t s = first; s < behind; ++s) (*samples)[s].spoil(0xEE);
  }
  BCP_RETURN_IF_ERROR(job->append_bytes("content", test::patterned(1000)));
  return job->finish();
}

format::Manifest save(const TempDir& dir, Random* random, std::deque<Sample>* samples, cuda::CallerStream* caller) {
  std::vector<SaveItem> items;
  for (const Sample& sample : *samples) {
    items.push_back({sample.fqn, sample.box.sizes, sample.box, sample.tensor.view(), {}});
  }
  items.push_back(test::bytes_item(test::patterned(1000)));
  auto commit = test::value_of(Commit::begin(test::commit_options(dir.path(), 1)));
  const format::WriteResult result = test::value_of(write_samples(random, samples, draw_options(random, dir), caller));
  const format::Manifest manifest =
      test::value_of(assemble_manifest(test::planned(items, test::save_id_of(1)), {result}));
  EXPECT_OK(commit->check_files(manifest.files));
  EXPECT_OK(commit->commit(format::encode_metadata_file(manifest), manifest.files, manifest.save_id));
  return test::value_of(open_checkpoint(dir.path(), {{}, /*check_pickle=*/true}));
}

std::vector<uint8_t> part_of(const Sample& sample, const Box& box) {
  const int64_t itemsize = tensor::find_dtype(sample.tensor.view().dtype)->itemsize_bytes;
  const Dims strides = contiguous_strides(sample.box.sizes, itemsize);
  std::vector<uint8_t> out;
  test::for_each_index(box.sizes, [&](const Dims& index) {
    const uint8_t* from = sample.wanted.data() + test::dot(index, strides) + test::dot(box.offsets, strides);
    out.insert(out.end(), from, from + itemsize);
  });
  return out;
}

/// A box of a stored tensor, and the memory that a load is to fill with it.
struct Target {
  Target(Random* random, const Sample& sample, const Box& box)
      : from(&sample),
        box(box),
        memory(random, sample.fqn, box.sizes, tensor::find_dtype(sample.tensor.view().dtype)->itemsize_bytes),
        block(memory.tensor.block_with(part_of(sample, box))) {}

  const Sample* from;
  Box box;
  Sample memory;
  std::vector<uint8_t> block;  // what the memory must be afterwards, with what is around it
};

/// Loads boxes of samples to new memory, on the device for the most part, behind what the caller's stream has to write
/// there. \returns how many boxes of a device were not taken, because they are of too many pieces.
int64_t load(const TempDir& dir, Random* random, const format::Manifest& manifest, const std::deque<Sample>& samples,
             cuda::CallerStream* caller) {
  LoadJob job(options_of_load(dir, draw(random, 0, 1) == 0), manifest);
  staging::DeviceCopies copies;
  use_devices(&copies, caller);
  job.destinations().set_copies(&copies);
  int64_t refused = 0;
  std::deque<Target> targets;
  for (const Sample& sample : samples) {
    const Box box = draw(random, 0, 1) == 0 ? sample.box : test::draw_box(random, sample.box.sizes);
    Target& target = targets.emplace_back(random, sample, box);
    const format::Chunk& chunk = manifest.find(sample.fqn)->chunks[0];
    const int device = target.memory.device;
    const base::Status added =
        job.destinations().add_tensor(sample.fqn, chunk, place_of(chunk), box, target.memory.tensor.view(), device);
    if (added.code() == Code::kUnsupported) {
      ++refused;
      targets.pop_back();
      continue;
    }
    EXPECT_OK(added);
    if (device != staging::kHost) caller->enqueue([&target] { target.memory.spoil(0x11); });
  }
  static_cast<void>(test::value_of(job.run(kNever)));
  for (const Target& target : targets) {
    INFO(target.from->fqn, " ", tensor::to_text(target.box.sizes));
    CHECK(target.memory.tensor.block() == target.block);
  }
  CHECK(cuda::num_enqueued() == 0);
  return refused;
}

TEST_CASE("device_jobs on host: what is saved from a device is what its stream wrote, and comes back to it") {
  int64_t launches = 0;
  for (uint64_t seed = 1; seed <= 8; ++seed) {
    INFO("round ", seed);
    Random random(seed);
    cuda::begin_round(seed, seed % 4 == 0 ? draw(&random, 0, 3 << 20) : int64_t{1} << 40);
    const TempDir dir;
    {
      cuda::CallerStream caller;
      std::deque<Sample> samples = draw_samples(&random);
      const format::Manifest manifest = save(dir, &random, &samples, &caller);
      CHECK(cuda::counts().locked_regions == 1);  // the ring
      load(dir, &random, manifest, samples, &caller);
      launches += cuda::counts().launches;
    }
    free_all();
    CHECK(cuda::counts().locked_regions == 0);
  }
  CHECK(launches > 8);
}

TEST_CASE("device_jobs on host: a box of many short rows is not for a device") {
  Random random(1);
  cuda::begin_round(1, int64_t{1} << 40);
  const TempDir dir;
  {
    cuda::CallerStream caller;
    std::deque<Sample> samples;
    samples.emplace_back(&random, "t", Dims{9000, 64}, 4);
    const format::Manifest manifest = save(dir, &random, &samples, &caller);
    LoadJob job(options_of_load(dir), manifest);
    staging::DeviceCopies copies;
    REQUIRE(test::value_of(copies.use(kDevice, caller.handle())));
    job.destinations().set_copies(&copies);
    const format::Chunk& chunk = manifest.find("t")->chunks[0];
    const SampleTensor narrow(&random, Dims{9000, 2}, 4, false), wide(&random, Dims{9000, 63}, 4, false);
    const auto add = [&](const SampleTensor& memory) {
      const Box box{{0, 1}, memory.view().sizes};
      return job.destinations().add_tensor("t", chunk, place_of(chunk), box, memory.view(), kDevice).code();
    };
    CHECK(add(narrow) == Code::kUnsupported);
    CHECK(job.destinations().any_device() == staging::kHost);
    CHECK(add(wide) == Code::kUnsupported);  // 252 bytes
    const SampleTensor whole(&random, Dims{9000, 64}, 4, false);
    const Box box = tensor::whole({9000, 64});
    EXPECT_OK(job.destinations().add_tensor("t", chunk, place_of(chunk), box, whole.view(), kDevice));
    CHECK(job.destinations().any_device() == kDevice);
    CHECK(!job.destinations().is_plain());
    static_cast<void>(test::value_of(job.run(kNever)));
    CHECK(whole.packed() == samples[0].wanted);
  }
  free_all();
}

TEST_CASE("device_jobs on host: a device that refuses fails the save or the load, and nothing goes on behind it") {
  int64_t failed = 0;
  for (uint64_t seed = 1; seed <= 16; ++seed) {
    INFO("round ", seed);
    Random random(seed);
    cuda::begin_round(seed, int64_t{1} << 40);
    const TempDir dir;
    {
      cuda::CallerStream caller;
      std::deque<Sample> samples;
      for (int t = 0; t < 20; ++t) {
        samples.emplace_back(&random, "t" + std::to_string(t), Dims{100, 33 + t}, 8);
        samples.back().device = kDevice;
      }
      const format::Manifest manifest = save(dir, &random, &samples, &caller);
      const TempDir other;
      cuda::fail_after(draw(&random, 0, 30));
      const auto written = write_samples(&random, &samples, test::save_options(other.path()), &caller);
      cuda::fail_after(-1);
      if (!written.is_ok()) {
        ++failed;
        CHECK(written.status().code() == Code::kDevice);
        CHECK(test::contains(written.status().message(), "while saving 't"));
      }
      CHECK(cuda::num_enqueued() == 0);

      LoadJob job(options_of_load(dir), manifest);
      staging::DeviceCopies copies;
      REQUIRE(test::value_of(copies.use(kDevice, caller.handle())));
      job.destinations().set_copies(&copies);
      std::deque<Target> targets;
      for (const Sample& sample : samples) {
        Target& target = targets.emplace_back(&random, sample, sample.box);
        const format::Chunk& chunk = manifest.find(sample.fqn)->chunks[0];
        EXPECT_OK(job.destinations().add_tensor(sample.fqn, chunk, place_of(chunk), sample.box,
                                                target.memory.tensor.view(), kDevice));
      }
      cuda::fail_after(draw(&random, 0, 12));
      const auto loaded = job.run(kNever);
      cuda::fail_after(-1);
      if (loaded.is_ok()) {
        for (const Target& target : targets) CHECK(target.memory.tensor.block() == target.block);
      } else {
        ++failed;
        CHECK(loaded.status().code() == Code::kDevice);
      }
      CHECK(cuda::num_enqueued() == 0);
    }
    free_all();
  }
  CHECK(failed > 8);
}

}  // namespace
}  // namespace bytecheckpoint::engine
