// SPDX-License-Identifier: Apache-2.0
#include "csrc/engine/load/shared_run.h"

#include <algorithm>
#include <cstring>
#include <fstream>
#include <functional>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "csrc/engine/open/open_checkpoint.h"
#include "tests/cpp/aligned_bytes.h"
#include "tests/cpp/expect.h"
#include "tests/cpp/saved_checkpoint.h"
#include "tests/cpp/temp_dir.h"

namespace bytecheckpoint::engine {
namespace {

using test::TempDir;

constexpr size_t kBytes = (12 << 20) + 4321;

/// Ranks of one process that load one item of bytes. A copy replaces the transfer through a process group.
struct World {
  World(const TempDir& dir, const format::Manifest& manifest, uint32_t num_ranks) {
    LoadOptions options;
    options.directory = dir.path();
    options.num_io_threads = 2;
    options.ring_bytes = 32 << 20;
    options.io_timeout_s = 60;
    contents.assign(num_ranks, std::string(kBytes, '\0'));
    std::vector<std::vector<planner::BlockRange>> ranges;
    for (uint32_t rank = 0; rank < num_ranks; ++rank) {
      jobs.push_back(std::make_unique<LoadJob>(options, manifest));
      add(rank, manifest);
      ranges.push_back(wanted_blocks(jobs[rank].get()).merged());
    }
    plan = planner::plan_share(ranges, format::kBlockBytes, staging::kSlotBytes);
  }

  void add(uint32_t rank, const format::Manifest& manifest) {
    jobs[rank]->destinations().add_bytes(manifest.find("content")->chunks[0].record,
                                         reinterpret_cast<uint8_t*>(contents[rank].data()));
  }

  void start() {
    for (uint32_t rank = 0; rank < jobs.size(); ++rank) {
      SharedMemory* memory = memories.empty() ? nullptr : memories[rank].get();
      runs.push_back(test::value_of(SharedRun::start(jobs[rank].get(), plan, rank, memory)));
    }
  }

  /// Lets ranks take units from one another's memory, from now on.
  void share_memory() {
    for (const auto& job : jobs) memories.push_back(test::value_of(SharedMemory::map(job->options().ring_bytes)));
    for (uint32_t rank = 0; rank < jobs.size(); ++rank) {
      for (uint32_t peer = 0; peer < jobs.size(); ++peer) {
        if (peer != rank) EXPECT_OK(memories[rank]->open(peer, test::value_of(memories[peer]->address())));
      }
    }
  }

  /// Exchanges unit by unit; each rank takes it from its owner's memory. \param spoil  Called on each unit before that.
  base::Status exchange_in_memory(bool is_verified, const std::function<void(uint8_t*)>& spoil) {
    for (size_t u = 0; u < plan.units.size(); ++u) {
      SharedRun& owner = *runs[plan.units[u].owner];
      BCP_ASSIGN_OR_RETURN(const auto own, owner.next_own(/*wait=*/true));
      REQUIRE(owner.num_own_slots() == owner.num_slots());  // nothing is received
      spoil(owner.slot(own->slot));
      for (auto& run : runs) {
        const uint8_t* memory = run->memory_of(u, own->slot);
        REQUIRE(memory != nullptr);
        CHECK((memory == owner.slot(own->slot)) == (run.get() == &owner));
        BCP_RETURN_IF_ERROR(run->check(u, memory, own->bytes, is_verified));
        BCP_RETURN_IF_ERROR(run->scatter(u, memory, own->bytes));
      }
      owner.release(own->slot);
    }
    return base::Status::ok();
  }

  /// Exchanges unit by unit, in the common order. \param spoil  Called on each unit in transit.
  base::Status exchange(const std::function<void(uint8_t*)>& spoil) {
    for (size_t u = 0; u < plan.units.size(); ++u) {
      SharedRun& owner = *runs[plan.units[u].owner];
      BCP_ASSIGN_OR_RETURN(const auto own, owner.next_own(/*wait=*/true));
      REQUIRE(own.has_value());
      REQUIRE(own->unit == u);  // all ranks want all units
      REQUIRE(own->slot < owner.num_own_slots());
      for (auto& run : runs) {
        if (run.get() == &owner) continue;
        REQUIRE(run->num_own_slots() < run->num_slots());
        uint8_t* slot = run->slot(run->num_slots() - 1);
        std::memcpy(slot, owner.slot(own->slot), static_cast<size_t>(own->bytes));
        spoil(slot);
        BCP_RETURN_IF_ERROR(run->check(u, slot, own->bytes));
        BCP_RETURN_IF_ERROR(run->scatter(u, slot, own->bytes));
      }
      BCP_RETURN_IF_ERROR(owner.scatter(u, owner.slot(own->slot), own->bytes));
      owner.release(own->slot);
    }
    return base::Status::ok();
  }

  std::vector<std::string> contents;
  std::vector<std::unique_ptr<LoadJob>> jobs;
  planner::SharePlan plan;
  std::vector<std::unique_ptr<SharedMemory>> memories;
  std::vector<std::unique_ptr<SharedRun>> runs;  // destroyed before the jobs and memories that they use
};

format::Manifest save_content(const TempDir& dir) {
  test::save_checkpoint(dir.path(), 1, test::patterned(kBytes));
  return test::value_of(open_checkpoint(dir.path()));
}

TEST_CASE("shared_run: every rank gets all of what each read a part of") {
  const TempDir dir;
  const format::Manifest manifest = save_content(dir);
  for (const uint32_t num_ranks : {1u, 2u, 3u}) {
    World world(dir, manifest, num_ranks);
    world.start();
    EXPECT_OK(world.exchange([](uint8_t*) {}));
    int64_t bytes_read = 0;
    for (uint32_t rank = 0; rank < num_ranks; ++rank) {
      const auto at_the_end = test::value_of(world.runs[rank]->next_own(/*wait=*/true));
      CHECK_FALSE(at_the_end.has_value());
      const LoadStats stats = test::value_of(world.runs[rank]->finish());
      CHECK((world.contents[rank] == test::patterned(kBytes)));
      CHECK(stats.bytes_wanted == static_cast<int64_t>(kBytes));
      CHECK(stats.bytes_read + stats.bytes_received == world.plan.bytes_distinct);
      bytes_read += stats.bytes_read;
    }
    CHECK(bytes_read == world.plan.bytes_distinct);
  }
}

TEST_CASE("shared_run: a byte that changed on its way is found before it is used") {
  const TempDir dir;
  const format::Manifest manifest = save_content(dir);
  World world(dir, manifest, 2);
  world.start();
  EXPECT_FAILURE(kCorrupt, "block has CRC", world.exchange([](uint8_t* bytes) { bytes[5000] ^= 1; }));
}

TEST_CASE("shared_run: every rank gets all of what it takes from the memory of the others, round after round") {
  const TempDir dir;
  const format::Manifest manifest = save_content(dir);
  for (const uint32_t num_ranks : {2u, 3u}) {
    World world(dir, manifest, num_ranks);
    world.share_memory();
    for (int round = 0; round < 3; ++round) {
      world.start();
      EXPECT_OK(world.exchange_in_memory(/*is_verified=*/true, [](uint8_t*) {}));
      for (uint32_t rank = 0; rank < num_ranks; ++rank) {
        test::value_of(world.runs[rank]->finish());
        CHECK((world.contents[rank] == test::patterned(kBytes)));
        world.contents[rank].assign(kBytes, '\0');
        world.add(rank, manifest);
      }
      world.runs.clear();
    }
  }
}

TEST_CASE("shared_run: who takes a unit that its owner has not verified verifies it") {
  const TempDir dir;
  const format::Manifest manifest = save_content(dir);
  World world(dir, manifest, 2);
  world.share_memory();
  world.start();
  EXPECT_FAILURE(kCorrupt, "block has CRC",
                 world.exchange_in_memory(/*is_verified=*/false, [](uint8_t* bytes) { bytes[5000] ^= 1; }));
}

TEST_CASE("shared_run: a slot or a unit that is not there has no memory") {
  const TempDir dir;
  const format::Manifest manifest = save_content(dir);
  World world(dir, manifest, 2);
  world.share_memory();
  world.start();
  const SharedRun& run = *world.runs[0];
  for (size_t u = 0; u < world.plan.units.size(); ++u) {
    CHECK(run.memory_of(u, 3) != nullptr);
    CHECK(run.memory_of(u, 4) == nullptr);
    CHECK(run.memory_of(u, -1) == nullptr);
  }
  CHECK(run.memory_of(world.plan.units.size(), 0) == nullptr);
}

TEST_CASE("shared_run: a unit of another size than the file has is refused") {
  const TempDir dir;
  const format::Manifest manifest = save_content(dir);
  World world(dir, manifest, 2);
  world.start();
  EXPECT_FAILURE(kCorrupt, "rank 0 read 5 bytes", world.runs[1]->check(0, world.runs[1]->slot(0), 5));
}

TEST_CASE("shared_run: a damaged block is its owner's failure, and nothing of it goes out") {
  const TempDir dir;
  const format::Manifest manifest = save_content(dir);
  std::fstream file(dir.path() + "/" + manifest.files[0].name, std::ios::in | std::ios::out | std::ios::binary);
  file.seekp(5 << 20);
  file.put('\x7F');
  file.close();
  World world(dir, manifest, 2);
  world.start();
  EXPECT_FAILURE(kCorrupt, "offset=5242880", world.exchange([](uint8_t*) {}));
}

TEST_CASE("shared_run: a plan for other destinations is refused, and the destinations are forgotten") {
  const TempDir dir;
  const format::Manifest manifest = save_content(dir);
  World world(dir, manifest, 2);
  world.jobs[0]->destinations().clear();
  EXPECT_FAILURE(kInvalidArgument, "rank 0", SharedRun::start(world.jobs[0].get(), world.plan, 0).status());
  world.plan.units.pop_back();
  EXPECT_FAILURE(kInvalidArgument, "rank 1", SharedRun::start(world.jobs[1].get(), world.plan, 1).status());
  CHECK(world.jobs[1]->destinations().wanted().empty());
}

TEST_CASE("shared_run: a run that is given up in the middle ends its reading") {
  const TempDir dir;
  const format::Manifest manifest = save_content(dir);
  World world(dir, manifest, 2);
  world.start();
  CHECK(test::value_of(world.runs[0]->next_own(/*wait=*/true)).has_value());
  world.runs.clear();
}

}  // namespace
}  // namespace bytecheckpoint::engine
