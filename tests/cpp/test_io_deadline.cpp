// SPDX-License-Identifier: Apache-2.0
#include "csrc/io/io_deadline.h"

#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <chrono>
#include <future>
#include <memory>
#include <string>
#include <thread>

#include "tests/cpp/expect.h"

namespace bytecheckpoint::io {
namespace {

using base::Result;
using base::Status;

constexpr double kShortS = 0.05;
constexpr double kLongS = 60;

/// Storage answers when this opens.
struct Gate {
  std::promise<void> opening;
  std::shared_future<void> opened{opening.get_future()};
  void open() { opening.set_value(); }
};

TEST_CASE("io deadline: without a limit the caller itself makes the call") {
  IoDeadline deadline(0);
  const auto me = std::this_thread::get_id();
  CHECK(test::value_of(deadline.run("stat", "/a", [&] { return Result<bool>(std::this_thread::get_id() == me); })));
  deadline.shorten(kShortS);
  CHECK(test::value_of(deadline.run("stat", "/a", [&] { return Result<bool>(std::this_thread::get_id() == me); })));
  CHECK_FALSE(deadline.is_exhausted());
}

TEST_CASE("io deadline: all calls are made by one other thread, and their outcomes come back") {
  IoDeadline deadline(kLongS);
  const auto thread = [] { return Result<std::thread::id>(std::this_thread::get_id()); };
  const std::thread::id first = test::value_of(deadline.run("stat", "/a", thread));
  CHECK((first != std::this_thread::get_id()));
  CHECK((test::value_of(deadline.run("stat", "/a", thread)) == first));
  EXPECT_FAILURE(kBusy, "held", deadline.run("open", "/a", [] { return Status::make(base::Code::kBusy, "held"); }));
  // Move-only values go in and come out.
  auto in = std::make_unique<int>(7);
  const auto out = deadline.run("open", "/a",
                                [in = std::move(in)]() mutable { return Result<std::unique_ptr<int>>(std::move(in)); });
  CHECK(*out.value() == 7);
}

TEST_CASE("io deadline: a call that is not answered fails, and nothing more is asked") {
  Gate gate;
  std::atomic<int> calls{0}, late{0};
  {
    IoDeadline deadline(kShortS);
    const auto work = [&calls, opened = gate.opened] {
      ++calls;
      opened.wait();
      return Status::ok();
    };
    const Status failure = deadline.run("fsync", "/mnt/a", work, [&] { ++late; });
    EXPECT_FAILURE(kStorage, "fsync(/mnt/a): the storage has not answered for 0.05 s (Config.io_timeout_s)", failure);
    CHECK(failure.sys_errno() == ETIMEDOUT);
    CHECK(failure.path() == "/mnt/a");
    CHECK(deadline.is_exhausted());
    EXPECT_FAILURE(kStorage, "unlink(/mnt/b)", deadline.run("unlink", "/mnt/b", work, [&] { ++late; }));
    CHECK(late == 0);
    gate.open();
  }
  // The first call ended late, the second never began.
  CHECK(calls == 1);
  CHECK(late == 1);
}

TEST_CASE("io deadline: who waits behind a call that is not answered fails with it, and is not asked afterwards") {
  Gate gate, begun;
  std::atomic<bool> asked{false};
  {
    IoDeadline deadline(1);
    std::thread first([&] {
      EXPECT_CODE(kStorage, deadline.run("open", "/a", [&begun, opened = gate.opened] {
        begun.open();
        opened.wait();
        return Status::ok();
      }));
    });
    begun.opened.wait();
    EXPECT_CODE(kStorage, deadline.run("unlink", "/a", [&] {
      asked = true;
      return Status::ok();
    }));
    first.join();
    gate.open();
  }
  CHECK_FALSE(asked);
}

TEST_CASE("io deadline: each answer begins the time anew") {
  IoDeadline deadline(1);
  EXPECT_OK(deadline.run("unlink", "/a", [&deadline] {
    const auto end = std::chrono::steady_clock::now() + std::chrono::milliseconds(2500);
    while (std::chrono::steady_clock::now() < end) deadline.answered();
    return Status::ok();
  }));
}

TEST_CASE("io deadline: it can be shortened, and not made longer") {
  Gate gate;
  {
    IoDeadline deadline(kLongS);
    deadline.shorten(kShortS);
    deadline.shorten(kLongS);
    EXPECT_FAILURE(kStorage, "for 0.05 s", deadline.run("unlink", "/a", [opened = gate.opened] {
      opened.wait();
      return Status::ok();
    }));
    gate.open();
  }
}

TEST_CASE("io deadline: what comes too late is freed by the thread that got it, before the end") {
  struct Answer {
    explicit Answer(std::thread::id* freed_by) : freed_by(freed_by) {}
    ~Answer() { *freed_by = std::this_thread::get_id(); }
    std::thread::id* freed_by;
  };
  Gate gate;
  std::thread::id freed_by;
  {
    IoDeadline deadline(kShortS);
    const auto outcome = deadline.run("open", "/a", [&freed_by, opened = gate.opened] {
      opened.wait();
      return Result<std::unique_ptr<Answer>>(std::make_unique<Answer>(&freed_by));
    });
    EXPECT_CODE(kStorage, outcome.status());
    gate.open();
  }
  CHECK((freed_by != std::thread::id()));
  CHECK((freed_by != std::this_thread::get_id()));
}

TEST_CASE("io deadline: run_within leaves behind what is not answered") {
  Gate gate;
  std::promise<void> ended;
  EXPECT_OK(run_with_deadline(kLongS, "stat", "/a", [] { return Status::ok(); }));
  EXPECT_CODE(kStorage, run_with_deadline(kShortS, "stat", "/a", [opened = gate.opened, &ended] {
                opened.wait();
                ended.set_value();
                return Status::ok();
              }));
  gate.open();
  ended.get_future().wait();
}

TEST_CASE("io deadline: an object whose end hangs is deleted when it can be") {
  struct Slow {
    ~Slow() {
      opened.wait();
      ended->set_value();
    }
    std::shared_future<void> opened;
    std::promise<void>* ended;
  };
  Gate gate;
  std::promise<void> ended;
  auto has_ended = ended.get_future();
  std::unique_ptr<Slow, DeleteInBackground>(new Slow{gate.opened, &ended}).reset();
  CHECK(has_ended.wait_for(std::chrono::seconds(0)) == std::future_status::timeout);
  gate.open();
  has_ended.wait();
  // An object that ends in time has ended when its owner continues. Without a limit the owner itself ends it.
  std::promise<void> quick, own;
  std::unique_ptr<Slow, DeleteInBackground>(new Slow{gate.opened, &quick}).reset();
  CHECK(quick.get_future().wait_for(std::chrono::seconds(60)) == std::future_status::ready);
  std::unique_ptr<Slow, DeleteInBackground>(new Slow{gate.opened, &own}, DeleteInBackground{false}).reset();
  CHECK(own.get_future().wait_for(std::chrono::seconds(0)) == std::future_status::ready);
}

TEST_CASE("io deadline: a forked child asks by itself, and waits for no thread of its parent") {
  Gate gate;
  auto deadline = std::make_unique<IoDeadline>(kShortS);
  EXPECT_CODE(kStorage, deadline->run("stat", "/a", [opened = gate.opened] {
    opened.wait();
    return Status::ok();
  }));
  const pid_t child = ::fork();
  if (child == 0) {
    const bool asked = deadline->run("stat", "/a", [] { return Status::ok(); }).is_ok();
    deadline.reset();
    ::_exit(asked ? 0 : 1);
  }
  int status = -1;
  REQUIRE(::waitpid(child, &status, 0) == child);
  CHECK(WIFEXITED(status));
  CHECK(WEXITSTATUS(status) == 0);
  gate.open();
}

}  // namespace
}  // namespace bytecheckpoint::io
