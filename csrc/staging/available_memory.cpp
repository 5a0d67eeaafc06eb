// SPDX-License-Identifier: Apache-2.0
#include "csrc/staging/available_memory.h"

#include <algorithm>
#include <fstream>
#include <limits>
#include <string>

namespace bytecheckpoint::staging {
namespace {

constexpr int64_t kUnknown = -1;

/// Returns the number after `key` in lines of `key number`; the first number in the file if `key` is empty.
int64_t number_in(const std::string& path, const std::string& key) {
  std::ifstream file(path);
  std::string word;
  while (file >> word) {
    if (!key.empty() && word != key) continue;
    if (!key.empty() && !(file >> word)) break;
    // "max", or a number that no process reaches: there is no limit.
    if (word.empty() || word.size() > 18 || word.find_first_not_of("0123456789") != std::string::npos) break;
    return std::stoll(word);
  }
  return kUnknown;
}

/// Returns what the control group has left, as the process sees it: containers mount their own at the root. The group's
/// file cache counts as free.
int64_t left_by(const std::string& limit_path, const std::string& used_path, const std::string& stat_path,
                const std::string& cache_key) {
  const int64_t limit = number_in(limit_path, ""), used = number_in(used_path, "");
  if (limit == kUnknown || used == kUnknown) return kUnknown;
  return std::max<int64_t>(0, limit - used + std::max<int64_t>(0, number_in(stat_path, cache_key)));
}

/// Returns what the kernel may still promise if it never overcommits. There, touching one page of a memfd too many is
/// no error that we could handle: the process dies of SIGBUS.
int64_t left_to_commit(const std::string& root, const std::string& meminfo) {
  constexpr int64_t kNeverOvercommit = 2;
  if (number_in(root + "/proc/sys/vm/overcommit_memory", "") != kNeverOvercommit) return kUnknown;
  const int64_t limit = number_in(meminfo, "CommitLimit:"), used = number_in(meminfo, "Committed_AS:");
  return limit == kUnknown || used == kUnknown ? kUnknown : std::max<int64_t>(0, limit - used) * 1024;
}

}  // namespace

int64_t available_memory_bytes(const std::string& root) {
  const std::string v2 = root + "/sys/fs/cgroup/memory.", v1 = root + "/sys/fs/cgroup/memory/memory.";
  const std::string meminfo = root + "/proc/meminfo";
  const int64_t of_system = number_in(meminfo, "MemAvailable:");
  int64_t least = std::numeric_limits<int64_t>::max();
  for (const int64_t bytes :
       {of_system == kUnknown ? kUnknown : of_system * 1024, left_to_commit(root, meminfo),
        left_by(v2 + "max", v2 + "current", v2 + "stat", "inactive_file"),
        left_by(v1 + "limit_in_bytes", v1 + "usage_in_bytes", v1 + "stat", "total_inactive_file")}) {
    if (bytes != kUnknown) least = std::min(least, bytes);
  }
  return least == std::numeric_limits<int64_t>::max() ? kUnknown : least;
}

}  // namespace bytecheckpoint::staging
