// SPDX-License-Identifier: Apache-2.0
#include "csrc/engine/shared_run.h"

#include <algorithm>
#include <cstring>
#include <fstream>
#include <functional>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "csrc/engine/open_checkpoint.h"
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
      runs.push_back(test::value_of(SharedRun::start(jobs[rank].get(), plan, rank)));
    }
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
  std::vector<std::unique_ptr<SharedRun>> runs;  // destroyed before the jobs that they use
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
