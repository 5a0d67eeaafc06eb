// SPDX-License-Identifier: Apache-2.0
#include "csrc/staging/arena.h"

#include <sys/wait.h>
#include <unistd.h>

#include <cstring>
#include <filesystem>
#include <string>
#include <thread>
#include <vector>

#include "csrc/staging/available_memory.h"
#include "tests/cpp/expect.h"
#include "tests/cpp/temp_dir.h"

namespace bytecheckpoint::staging {
namespace {

using base::Code;
using std::chrono::milliseconds;

const ArenaTerms kOneState;

TEST_CASE("pages: what is kept for their memory ends while it is there, and with what takes its place") {
  auto pages = test::value_of(Pages::map(1 << 20, "test", Pages::InFork::kAbsent));
  uint8_t* const first = pages->first();
  std::vector<int> ended;
  const auto held = [&](int number) {
    return std::shared_ptr<void>(nullptr, [&ended, first, number](void*) {
      first[number] = 1;  // faults if the memory is no longer mapped
      ended.push_back(number);
    });
  };
  CHECK(pages->held_bytes() == 0);
  pages->hold(held(1), 100);
  pages->hold(held(2), 200);
  CHECK(pages->held_bytes() == 200);
  CHECK(ended == std::vector<int>{1});
  pages.reset();
  CHECK(ended == std::vector<int>{1, 2});
}

TEST_CASE("arena: a region that was given back is warm memory for the next state") {
  Arena arena;
  uint8_t* first = nullptr;
  {
    const auto lease = test::value_of(arena.try_lease(5 << 20, kOneState));
    first = lease->pages()->first();
    std::memset(first, 7, 5 << 20);
  }
  const auto again = test::value_of(arena.try_lease(5 << 20, kOneState));
  CHECK(again->pages()->first() == first);
  CHECK(first[(5 << 20) - 1] == 7);
}

TEST_CASE("arena: as many states as the terms allow, no more") {
  Arena arena;
  const auto one = test::value_of(arena.try_lease(1, kOneState));
  CHECK(arena.try_lease(1, kOneState).status().code() == Code::kStagingBusy);
  ArenaTerms two;
  two.num_states = 2;
  const auto other = test::value_of(arena.try_lease(1, two));
  CHECK(other->pages().get() != one->pages().get());
  CHECK(arena.try_lease(1, two).status().code() == Code::kStagingBusy);
  one->release();
  CHECK(arena.try_lease(1, kOneState).status().code() == Code::kStagingBusy);  // the other lease still holds its region
  other->release();
  other->release();
  CHECK(arena.try_lease(1, kOneState).is_ok());
}

TEST_CASE("who takes the memory is told, while it does") {
  Arena arena;
  ArenaTerms terms{0, false, 2, "the first"};
  auto first = test::value_of(arena.try_lease(5, terms));
  terms.what = "the second";
  const auto second = test::value_of(arena.try_lease(7, terms));
  const auto both = arena.holders();
  REQUIRE(both.size() == 2);
  CHECK(both[0].bytes == 5);
  CHECK(both[0].what == "the first");
  CHECK(both[0].held_s >= both[1].held_s);
  first.reset();
  REQUIRE(arena.holders().size() == 1);
  CHECK(arena.holders()[0].bytes == 7);
  CHECK(arena.holders()[0].what == "the second");
}

TEST_CASE("arena: a larger state gets a larger region; whoever looks at the old one may go on") {
  Arena arena;
  auto small = test::value_of(arena.try_lease(100, kOneState));
  const std::shared_ptr<Pages> kept = small->pages();
  kept->first()[99] = 42;
  small.reset();
  const auto large = test::value_of(arena.try_lease(40 << 20, kOneState));
  large->pages()->first()[(40 << 20) - 1] = 1;
  CHECK(large->pages()->bytes() >= 40 << 20);
  CHECK(kept->first()[99] == 42);
  CHECK(arena.mapped_bytes() == large->pages()->bytes());
}

TEST_CASE("arena: what does not fit is refused with the size that it takes, whether it is busy or not") {
  Arena arena;
  ArenaTerms terms;
  terms.limit_bytes = 10 << 20;
  CHECK(arena.try_lease(10 << 20, terms).is_ok());
  for (const bool busy : {false, true}) {
    const auto lease = busy ? test::value_of(arena.try_lease(1, terms)) : nullptr;
    const base::Status refused = arena.try_lease((10 << 20) + 1, terms).status();
    CHECK(refused.code() == Code::kStagingFull);
    CHECK(refused.message() ==
          "staging: the state takes 10485761 bytes, but may take at most 10485760 (staging_bytes)");
  }
  const base::Status refused = arena.try_lease(int64_t{1} << 50, kOneState).status();
  CHECK(refused.code() == Code::kStagingFull);
  CHECK(refused.message().find("1125899906842624") != std::string::npos);
  CHECK(arena.try_lease(1, kOneState).is_ok());
}

TEST_CASE("arena: memory that is left is known, and less than what no machine has") {
  CHECK(available_memory_bytes() > 1 << 20);
  CHECK(available_memory_bytes() < int64_t{1} << 50);
}

TEST_CASE("arena: where the kernel never overcommits, what it has promised is not left") {
  const test::TempDir root;
  std::filesystem::create_directories(root / "proc/sys/vm");
  test::write_all(root / "proc/meminfo",
                  "MemAvailable:    9000 kB\nCommitLimit:     5000 kB\nCommitted_AS:    4000 kB\n");
  CHECK(available_memory_bytes(root.path()) == 9000 << 10);
  for (const int mode : {0, 1, 2}) {
    test::write_all(root / "proc/sys/vm/overcommit_memory", std::to_string(mode));
    CHECK(available_memory_bytes(root.path()) == (mode == 2 ? 1000 : 9000) << 10);
  }
}

TEST_CASE("arena: each control group above the process has a limit of its own") {
  const test::TempDir root;
  const auto limit = [&](const std::string& group, const std::string& limit, const std::string& used, int cache) {
    std::filesystem::create_directories(root / group);
    const bool is_v1 = group.find("/memory") != std::string::npos;
    test::write_all(root / (group + (is_v1 ? "/memory.limit_in_bytes" : "/memory.max")), limit);
    test::write_all(root / (group + (is_v1 ? "/memory.usage_in_bytes" : "/memory.current")), used);
    test::write_all(root / (group + "/memory.stat"),
                    (is_v1 ? "total_inactive_file " : "inactive_file ") + std::to_string(cache) + "\n");
  };
  std::filesystem::create_directories(root / "proc/self");
  test::write_all(root / "proc/meminfo", "MemAvailable:    9000 kB\n");
  for (const std::string& at : {std::string("sys/fs/cgroup"), std::string("sys/fs/cgroup/memory")}) {
    const bool is_v1 = at.size() > 13;
    test::write_all(root / "proc/self/cgroup",
                    is_v1 ? "5:cpu:/\n4:hugetlb,memory:/job/step\n0::/\n" : "0::/job/step\n");
    CHECK(available_memory_bytes(root.path()) == 9000 << 10);
    limit(at + "/job/step", "max\n", "100\n", 0);
    CHECK(available_memory_bytes(root.path()) == 9000 << 10);
    limit(at + "/job", "5000\n", "4000\n", 500);
    CHECK(available_memory_bytes(root.path()) == 1500);
    limit(at + "/job/step", "2000\n", "1900\n", 0);
    CHECK(available_memory_bytes(root.path()) == 100);
    limit(at, "1000\n", "990\n", 0);  // also where the path is one outside of a container
    CHECK(available_memory_bytes(root.path()) == 10);
    std::filesystem::remove_all(root / "sys");
  }
}

TEST_CASE("arena: who waits is woken when a lease ends") {
  Arena arena;
  auto lease = test::value_of(arena.try_lease(1, kOneState));
  std::thread releaser([&] {
    std::this_thread::sleep_for(milliseconds(20));
    lease.reset();
  });
  while (!arena.try_lease(1, kOneState).is_ok()) arena.wait_for_release(milliseconds(10'000));
  releaser.join();
}

TEST_CASE("arena: another mapping of what is shared sees the same bytes") {
  Arena arena;
  ArenaTerms terms;
  terms.is_shareable = true;
  const auto lease = test::value_of(arena.try_lease(3 << 20, terms));
  REQUIRE(lease->pages()->fd() >= 0);
  const auto other = test::value_of(Pages::map_shared(lease->pages()->fd(), 3 << 20, "test"));
  lease->pages()->first()[12345] = 99;
  CHECK(other->first()[12345] == 99);
  CHECK(Pages::map_shared(lease->pages()->fd(), int64_t{1} << 40, "test").status().code() == Code::kInvalidArgument);
}

TEST_CASE("arena: a private region is replaced by one that can be shared") {
  Arena arena;
  CHECK(test::value_of(arena.try_lease(1, kOneState))->pages()->fd() < 0);
  ArenaTerms terms;
  terms.is_shareable = true;
  CHECK(test::value_of(arena.try_lease(1, terms))->pages()->fd() >= 0);
  CHECK(test::value_of(arena.try_lease(1, kOneState))->pages()->fd() >= 0);
}

TEST_CASE("arena: prepared memory is what the first state gets") {
  Arena arena;
  EXPECT_OK(arena.prepare(20 << 20, kOneState));
  const int64_t mapped = arena.mapped_bytes();
  CHECK(mapped >= 20 << 20);
  const auto lease = test::value_of(arena.try_lease(20 << 20, kOneState));
  EXPECT_OK(arena.prepare(40 << 20, kOneState));  // in use: has no effect
  CHECK(arena.mapped_bytes() == mapped);
}

TEST_CASE("arena: closing leaves what is in use to its users") {
  Arena arena;
  const auto lease = test::value_of(arena.try_lease(100, kOneState));
  lease->pages()->first()[0] = 3;
  arena.close();
  CHECK(arena.mapped_bytes() == 0);
  CHECK(lease->pages()->first()[0] == 3);
  lease->release();
  CHECK(arena.try_lease(100, kOneState).is_ok());
}

TEST_CASE("arena: in a forked child everything returns at once, with an error or without effect") {
  Arena arena;
  auto lease = test::value_of(arena.try_lease(100, kOneState));
  const pid_t child = ::fork();
  REQUIRE(child >= 0);
  if (child == 0) {
    const bool refused = arena.try_lease(1, kOneState).status().code() == Code::kUnsupported &&
                         arena.prepare(1, kOneState).code() == Code::kUnsupported && arena.mapped_bytes() == 0;
    lease->release();
    arena.wait_for_release(milliseconds(60'000));
    arena.close();
    lease.reset();
    ::_exit(refused ? 0 : 1);
  }
  int status = 0;
  REQUIRE(::waitpid(child, &status, 0) == child);
  CHECK(WIFEXITED(status));
  CHECK(WEXITSTATUS(status) == 0);
  lease->pages()->first()[0] = 1;
}

TEST_CASE("arena: leases from many threads never overlap") {
  Arena arena;
  ArenaTerms terms;
  terms.num_states = 2;
  constexpr int kThreads = 4;
  std::vector<int> wrong(kThreads, 0);
  std::vector<std::thread> threads;
  for (int t = 0; t < kThreads; ++t) {
    threads.emplace_back([&, t] {
      for (int round = 0; round < 50;) {
        const auto lease = arena.try_lease(100 + round, terms);
        if (!lease.is_ok()) {
          arena.wait_for_release(milliseconds(1));
          continue;
        }
        uint8_t* memory = lease.value()->pages()->first();
        std::memset(memory, t, 100);
        std::this_thread::yield();
        for (int i = 0; i < 100; ++i) wrong[t] += memory[i] == t ? 0 : 1;
        ++round;
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  CHECK(wrong == std::vector<int>(kThreads, 0));
}

}  // namespace
}  // namespace bytecheckpoint::staging
