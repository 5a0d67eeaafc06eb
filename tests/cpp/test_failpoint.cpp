// SPDX-License-Identifier: Apache-2.0
#include "csrc/base/failpoint.h"

#include <doctest/doctest.h>
#include <sys/wait.h>
#include <unistd.h>

#include <csignal>
#include <cstdlib>
#include <iterator>
#include <set>
#include <string>

namespace bytecheckpoint::base {
namespace {

/// Returns the signal that ended a child, in which `hits` commits were done under BCP_FAILPOINT=wanted, or 0 if it
/// survived.
int signal_of_child(const char* wanted, int hits) {
  const pid_t child = ::fork();
  if (child == 0) {
    ::setenv("BCP_FAILPOINT", wanted, 1);
    for (int i = 0; i < hits; ++i) BCP_FAILPOINT(kCommitDone);
    ::_exit(0);
  }
  int status = 0;
  REQUIRE(::waitpid(child, &status, 0) == child);
  return WIFSIGNALED(status) ? WTERMSIG(status) : 0;
}

TEST_CASE("failpoint: every point has one name") {
  const std::set<std::string> names(std::begin(kFailpointNames), std::end(kFailpointNames));
  CHECK(names.size() == std::size(kFailpointNames));
  CHECK(std::size(kFailpointNames) == static_cast<size_t>(Failpoint::kCommitDone) + 1);
  CHECK(std::string(kFailpointNames[static_cast<size_t>(Failpoint::kCommitRenamed)]) == "commit_renamed");
  CHECK(std::string(kFailpointNames[static_cast<size_t>(Failpoint::kCommitDone)]) == "commit_done");
}

TEST_CASE("failpoint: kills at the point that is named, at the time that is named") {
  CHECK(signal_of_child("commit_done", 1) == SIGKILL);
  CHECK(signal_of_child("commit_done:3", 3) == SIGKILL);
  CHECK(signal_of_child("commit_done:3", 2) == 0);
  CHECK(signal_of_child("commit_renamed", 1) == 0);
  CHECK(signal_of_child("commit_don", 1) == 0);
  CHECK(signal_of_child("", 1) == 0);
}

TEST_CASE("failpoint: stops, and goes on when it is told") {
  const pid_t child = ::fork();
  if (child == 0) {
    ::setenv("BCP_FAILPOINT", "commit_done:2=stop", 1);
    BCP_FAILPOINT(kCommitDone);
    BCP_FAILPOINT(kCommitDone);
    BCP_FAILPOINT(kCommitDone);
    ::_exit(7);
  }
  int status = 0;
  REQUIRE(::waitpid(child, &status, WUNTRACED) == child);
  REQUIRE(WIFSTOPPED(status));
  CHECK(WSTOPSIG(status) == SIGSTOP);
  REQUIRE(::kill(child, SIGCONT) == 0);
  REQUIRE(::waitpid(child, &status, WUNTRACED) == child);
  REQUIRE(WIFEXITED(status));
  CHECK(WEXITSTATUS(status) == 7);
}

}  // namespace
}  // namespace bytecheckpoint::base
