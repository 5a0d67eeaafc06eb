// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <string>
#include <thread>

#include "csrc/base/status.h"

// File systems of networks and in user space show late what another machine has created, replaced or removed: for
// seconds, or until they are asked in the right way. What works everywhere that was tried (docs/guarantees.md) is to
// list the directory, and the one above it where a name was missing, and then to open the file anew below a directory
// that is open for reading.

namespace bytecheckpoint::io {

/// Lists a directory of a file system that may show changes late, so that it asks its server. No effect on local ones.
void freshen(const std::string& directory);

/// The same for a directory in which something was missing, and for those above it.
/// \returns false, without having asked, on a local file system: what is missing there is missing.
bool look_anew(const std::string& directory);

/// Makes a system call again, after a second look at `directory`, if what it needs is not there or was replaced.
/// \param call  Returns what the system call does: a negative number and errno if it fails.
template <class Call>
int call_until_seen(const std::string& directory, const Call& call) {
  const int outcome = call();
  const int error = errno;
  if (outcome >= 0 || (error != ENOENT && error != ESTALE)) return outcome;
  if (look_anew(directory)) return call();
  errno = error;
  return outcome;
}

/// Whether a failure is one of those that end when a change is seen: a missing name, a file that was replaced, and one
/// that ends early.
bool may_be_late(const base::Status& failure);

/// Calls `ask` until it succeeds, fails for another reason, or `timeout_s` are over. It is asked once on a local file
/// system, and at least twice on others. \returns the last outcome.
template <class Ask>
base::Status ask_until_seen(const std::string& directory, double timeout_s, const Ask& ask) {
  constexpr std::chrono::milliseconds kFirstWait(5), kLongestWait(500);
  const auto until = std::chrono::steady_clock::now() + std::chrono::duration<double>(timeout_s);
  base::Status outcome = ask();
  for (auto wait = kFirstWait; may_be_late(outcome) && look_anew(directory); wait = std::min(2 * wait, kLongestWait)) {
    outcome = ask();
    if (!may_be_late(outcome) || std::chrono::steady_clock::now() + wait > until) break;
    std::this_thread::sleep_for(wait);
  }
  return outcome;
}

/// Calls `read` again, for 2 s at most, while it meets a file that another machine has replaced since it was opened
/// (ESTALE). \returns the last outcome, a Result.
template <class Read>
auto read_what_is_there(const Read& read) -> decltype(read()) {
  constexpr std::chrono::milliseconds kWait(20);
  const auto until = std::chrono::steady_clock::now() + std::chrono::seconds(2);
  auto outcome = read();
  while (outcome.status().sys_errno() == ESTALE && std::chrono::steady_clock::now() < until) {
    std::this_thread::sleep_for(kWait);
    outcome = read();
  }
  return outcome;
}

}  // namespace bytecheckpoint::io
