// SPDX-License-Identifier: Apache-2.0
// Tests DeviceMerge as nvcc compiles it, with a stand-in for the device: bytes and order, not speed.
#include <cuda_runtime.h>
#include <doctest/doctest.h>

#include <algorithm>
#include <chrono>
#include <cstring>
#include <deque>
#include <string>
#include <vector>

#include "csrc/staging/device_merge.h"
#include "csrc/staging/device_transfers.h"
#include "tests/cpp/device_memory.h"
#include "tests/cpp/expect.h"
#include "tests/cpp/rounds.h"
#include "tests/cuda/cuda_on_host.h"

namespace bytecheckpoint::staging {
namespace {

namespace cuda = test::cuda_on_host;
using test::draw;
using test::Random;
using test::SampleTensor;

constexpr uint8_t kUntouched = 0x5A;
constexpr int64_t kPlenty = int64_t{1} << 40;

tensor::Dims draw_shape(Random* random, int64_t max_numel) {
  if (draw(random, 0, 1) == 0) return {draw(random, 0, max_numel)};
  tensor::Dims sizes;
  for (int64_t left = max_numel; left > 0 && sizes.size() < 4; left /= sizes.back() + 1) {
    sizes.push_back(draw(random, draw(random, 0, 9) == 0 ? 0 : 1, std::min<int64_t>(left, 60)));
  }
  return sizes;
}

/// Tensors "on the device", and their offsets in a host buffer.
struct Sample {
  Sample(Random* random, bool expand) {
    // many tiny ones, some medium ones, or a few, of which the large ones bypass scratch
    const int64_t kind = draw(random, 0, 2);
    int64_t end = draw(random, 0, 5000);
    for (int64_t left = draw(random, 0, kind == 0 ? 300 : 20); left > 0; --left) {
      const int64_t itemsize = int64_t{1} << draw(random, 0, 4);
      const int64_t max_bytes = kind == 0 ? 2000 : kind == 1 ? 200000 : 1500000;
      const tensor::Dims sizes = draw_shape(random, max_bytes / itemsize);
      tensors.emplace_back(random, sizes, itemsize, expand);
      wanted.push_back(tensors.back().packed());
      end += draw(random, 0, 1) == 0 ? 0 : draw(random, 0, 9) == 0 ? draw(random, 0, 100000) : draw(random, 0, 700);
      if (draw(random, 0, 3) != 0) end = (end + 63) / 64 * 64;
      pieces.push_back({tensors.back().view(), end});
      end += static_cast<int64_t>(wanted.back().size());
    }
    host.assign(static_cast<size_t>(end + 64), kUntouched);
  }

  /// Writes the elements of tensor `t`, each at all of its positions.
  void write(size_t t, const std::vector<uint8_t>& packed) {
    const std::vector<uint8_t> block = tensors[t].block_with(packed);
    std::memcpy(const_cast<uint8_t*>(tensors[t].block().data()), block.data(), block.size());
  }
  void fill(uint8_t value) {
    for (size_t t = 0; t < tensors.size(); ++t) write(t, std::vector<uint8_t>(wanted[t].size(), value));
  }
  void write_wanted() {
    for (size_t t = 0; t < tensors.size(); ++t) write(t, wanted[t]);
  }

  void check_host() const {
    int64_t end = 0;
    bool is_gap_alone = true;
    const auto check_gap = [&](int64_t next) {
      for (; end < next; ++end) is_gap_alone = is_gap_alone && (host[end] == kUntouched || host[end] == 0);
    };
    for (size_t t = 0; t < tensors.size(); ++t) {
      if (wanted[t].empty()) continue;
      check_gap(pieces[t].host_offset);
      REQUIRE(std::memcmp(host.data() + end, wanted[t].data(), wanted[t].size()) == 0);
      end += static_cast<int64_t>(wanted[t].size());
    }
    for (; end < static_cast<int64_t>(host.size()); ++end) is_gap_alone = is_gap_alone && host[end] == kUntouched;
    CHECK(is_gap_alone);
  }

  std::deque<SampleTensor> tensors;
  std::vector<std::vector<uint8_t>> wanted;  // row-major bytes
  std::vector<DevicePiece> pieces;
  std::vector<uint8_t> host;
};

/// A transfer, and the caller's stream, which writes before and after it.
struct Transfer {
  Transfer(Random* random, bool gathers) : sample(random, gathers), gathers(gathers) {}

  base::Result<int64_t> begin(Random* random, DeviceMerge* merge, cuda::CallerStream* caller) {
    if (gathers) {
      sample.fill(0xAA);
      caller->enqueue([this] { sample.write_wanted(); });  // late: a gather that does not wait finds 0xAA
    } else {
      for (size_t t = 0; t < sample.tensors.size(); ++t) {
        std::memcpy(sample.host.data() + sample.pieces[t].host_offset, sample.wanted[t].data(),
                    sample.wanted[t].size());
        blocks.push_back(sample.tensors[t].block_with(sample.wanted[t]));
      }
      caller->enqueue([this] { sample.fill(0x11); });  // overwrites a scatter that does not wait
    }
    if (fails_after >= 0) cuda::fail_after(fails_after);
    auto begun = gathers ? merge->begin_gather(sample.pieces, sample.host.data(), caller->handle())
                         : merge->begin_scatter(sample.pieces, sample.host.data(), caller->handle());
    cuda::fail_after(-1);
    if (!begun.is_ok()) {
      // No part of it continues. Earlier transfers do, if it failed because of them.
      if (!test::contains(begun.status().message(), "device transfer")) CHECK(cuda::num_enqueued() == 0);
      caller->synchronize();
      return begun;
    }
    number = begun.value();
    if (gathers && draw(random, 0, 1) == 0) return begun;
    REQUIRE(merge->make_stream_wait(caller->handle()).is_ok());
    if (gathers) {
      caller->enqueue([this] { sample.fill(0xEE); });
    } else {
      caller->enqueue([this] {
        for (const SampleTensor& tensor : sample.tensors) seen.push_back(tensor.block());
      });
    }
    return begun;
  }

  Sample sample;
  const bool gathers;
  int64_t fails_after = -1;
  int64_t number = -1;
  std::vector<std::vector<uint8_t>> blocks;  // the tensors' blocks with canaries, as a scatter should leave them
  std::vector<std::vector<uint8_t>> seen;    // the blocks as the caller's stream found them after it
};

void wait_somehow(Random* random, DeviceMerge* merge, int64_t number) {
  if (draw(random, 0, 1) == 0) {
    REQUIRE(merge->wait(number).is_ok());
    return;
  }
  while (!test::value_of(merge->is_done(number))) cuda::step();
}

struct Outcome {
  int64_t launches = 0;
  int64_t failed = 0;
};

Outcome run_round(uint64_t seed, bool has_failures) {
  INFO("round ", seed);
  Random random(seed);
  Outcome outcome;
  const bool is_short = draw(&random, 0, 4) == 0;
  cuda::begin_round(seed, is_short ? draw(&random, 0, 3 << 20) : kPlenty);
  {
    cuda::CallerStream caller;
    auto merge = test::value_of(
        DeviceMerge::create(0, draw(&random, 0, 7) == 0 ? 0 : draw(&random, int64_t{2} << 20, int64_t{5} << 20)));
    std::deque<Transfer> transfers;
    for (int64_t left = draw(&random, 1, 4); left > 0; --left) {
      Transfer& transfer = transfers.emplace_back(&random, draw(&random, 0, 1) == 0);
      if (has_failures) transfer.fails_after = draw(&random, 0, 60);
      if (!transfer.begin(&random, merge.get(), &caller).is_ok()) ++outcome.failed;
    }
    for (const Transfer& transfer : transfers) {
      if (transfer.number < 0) continue;
      wait_somehow(&random, merge.get(), transfer.number);
      if (transfer.gathers) transfer.sample.check_host();
    }
    caller.synchronize();
    for (const Transfer& transfer : transfers) {
      if (transfer.number >= 0 && !transfer.gathers) CHECK(transfer.seen == transfer.blocks);
    }
  }
  outcome.launches = cuda::counts().launches;
  CHECK(cuda::counts().streams == 0);
  CHECK(cuda::counts().pinned_blocks == 0);
  return outcome;
}

TEST_CASE("device_merge on host: every byte arrives, in whatever order streams run") {
  int64_t launches = 0;
  for (int seed = 1; seed <= test::rounds(60); ++seed)
    launches += run_round(static_cast<uint64_t>(seed), false).launches;
  CHECK(launches > test::rounds(60));
}

TEST_CASE("device_merge on host: what fails leaves nothing running, and what was begun before arrives") {
  int64_t failed = 0;
  for (int seed = 1; seed <= test::rounds(60); ++seed)
    failed += run_round(1000 + static_cast<uint64_t>(seed), true).failed;
  CHECK(failed > test::rounds(20));
}

TEST_CASE("device_merge on host: a capture of a CUDA graph in another thread goes on, and so do transfers") {
  Random random(1);
  cuda::begin_round(1, kPlenty);
  cuda::set_capturing(true);
  {
    cuda::CallerStream caller;
    auto pages = test::value_of(Pages::map(8 << 20, "test", Pages::InFork::kAbsent));
    REQUIRE(pin_pages(0, 1000, pages.get()).is_ok());
    auto merge = test::value_of(DeviceMerge::create(0));
    for (const bool gathers : {true, false, true}) {
      Transfer transfer(&random, gathers);
      REQUIRE(transfer.begin(&random, merge.get(), &caller).is_ok());
      wait_somehow(&random, merge.get(), transfer.number);
      if (gathers) transfer.sample.check_host();
      caller.synchronize();
      if (!gathers) CHECK(transfer.seen == transfer.blocks);
    }
    CHECK(cuda::counts().launches > 0);
  }
  CHECK(cuda::counts().locked_regions == 0);
  CHECK(!cuda::has_lost_capture());
  // Threads that have nothing to do with transfers still end a capture by such calls.
  CHECK(cudaEventQuery(nullptr) == cudaErrorStreamCaptureUnsupported);
  CHECK(cuda::has_lost_capture());
}

TEST_CASE("device_merge on host: a stream under capture is refused, and what was begun before arrives") {
  Random random(2);
  cuda::begin_round(2, kPlenty);
  cuda::CallerStream caller;
  auto merge = test::value_of(DeviceMerge::create(0));
  Transfer before(&random, true), refused(&random, true);
  REQUIRE(before.begin(&random, merge.get(), &caller).is_ok());
  caller.set_captured(true);
  const auto begun = merge->begin_gather(refused.sample.pieces, refused.sample.host.data(), caller.handle());
  CHECK(begun.status().code() == base::Code::kInvalidArgument);
  CHECK(test::contains(begun.status().message(), "inside the capture of a CUDA graph"));
  REQUIRE(merge->wait(before.number).is_ok());
  before.sample.check_host();
  caller.synchronize();
}

TEST_CASE("device_transfers on host: tensors of two devices, and pages that are locked until they are unmapped") {
  for (uint64_t seed = 1; seed <= 20; ++seed) {
    INFO("round ", seed);
    Random random(seed);
    cuda::begin_round(seed, kPlenty);
    {
      cuda::CallerStream caller;
      Sample first(&random, true), second(&random, true);
      auto pages = test::value_of(Pages::map(64 << 20, "test", Pages::InFork::kAbsent));
      REQUIRE(pin_pages(0, 1000, pages.get()).is_ok());
      REQUIRE(pin_pages(1, 1000, pages.get()).is_ok());
      CHECK(cuda::counts().locked_regions == 1);
      REQUIRE(pin_pages(1, 5 << 20, pages.get()).is_ok());  // locked again, as one region
      CHECK(cuda::counts().locked_regions == 1);
      CHECK(pages->held_bytes() == 6 << 20);
      pages.reset();
      CHECK(cuda::counts().locked_regions == 0);

      const auto merge = test::value_of(SharedDeviceMerge::find(0));
      CHECK((test::value_of(SharedDeviceMerge::find(0)) == merge));
      DeviceTransfers gather;
      REQUIRE(gather.begin_gather(merge, first.pieces, first.host.data(), caller.handle()).is_ok());
      const auto other = test::value_of(SharedDeviceMerge::find(1));
      REQUIRE(gather.begin_gather(other, second.pieces, second.host.data(), caller.handle()).is_ok());
      CHECK(gather.is_under_way());
      if (draw(&random, 0, 1) == 0) {
        REQUIRE(test::value_of(gather.wait_for(std::chrono::hours(1))));
      } else {
        gather.end();
      }
      CHECK(!gather.is_under_way());
      CHECK(cuda::num_enqueued() == 0);
      first.check_host();
      second.check_host();

      REQUIRE(gather.begin_gather(merge, first.pieces, first.host.data(), caller.handle()).is_ok());
      cuda::fail_after(0);  // nothing starts on the other device, and nothing continues on this one
      CHECK(!gather.begin_gather(other, second.pieces, second.host.data(), caller.handle()).is_ok());
      cuda::fail_after(-1);
      CHECK(!gather.is_under_way());
      CHECK(cuda::num_enqueued() == 0);
      SharedDeviceMerge::drop_all();
      CHECK(cuda::counts().streams == 4);  // their users keep them
    }
    CHECK(cuda::counts().streams == 0);
  }
}

}  // namespace
}  // namespace bytecheckpoint::staging
