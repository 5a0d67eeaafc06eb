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

/// How a version of control groups names its files.
struct GroupFiles {
  const char* root;
  const char* limit;
  const char* used;
  const char* cache;  // in `memory.stat`
};
constexpr GroupFiles kV1 = {"/sys/fs/cgroup/memory", "limit_in_bytes", "usage_in_bytes", "total_inactive_file"};
constexpr GroupFiles kV2 = {"/sys/fs/cgroup", "max", "current", "inactive_file"};

/// Returns what a control group has left. Its file cache counts as free.
int64_t left_by(const std::string& group, const GroupFiles& files) {
  const std::string memory = group + "/memory.";
  const int64_t limit = number_in(memory + files.limit, ""), used = number_in(memory + files.used, "");
  if (limit == kUnknown || used == kUnknown) return kUnknown;
  return std::max<int64_t>(0, limit - used + std::max<int64_t>(0, number_in(memory + "stat", files.cache)));
}

/// Returns the least that is left by the control group of the process and those above it: a batch system puts each job
/// into a group. In a container the path may be one outside of it; its own group is then mounted as the root.
int64_t left_by_groups(const std::string& root) {
  std::ifstream file(root + "/proc/self/cgroup");
  int64_t least = std::numeric_limits<int64_t>::max();
  const auto look = [&](const std::string& group, const GroupFiles& files) {
    const int64_t left = left_by(root + files.root + group, files);
    if (left != kUnknown) least = std::min(least, left);
  };
  look("", kV1);
  look("", kV2);
  for (std::string line; std::getline(file, line);) {  // "4:memory:/job/step" of version 1, "0::/job/step" of 2
    const size_t first = line.find(':'), second = line.find(':', first + 1);
    if (second == std::string::npos) continue;
    const std::string kinds = "," + line.substr(first + 1, second - first - 1) + ",";
    const bool is_v1 = kinds.find(",memory,") != std::string::npos;
    if (!is_v1 && kinds != ",,") continue;
    for (std::string group = line.substr(second + 1); group.size() > 1; group.erase(group.rfind('/'))) {
      look(group, is_v1 ? kV1 : kV2);
    }
  }
  return least == std::numeric_limits<int64_t>::max() ? kUnknown : least;
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
  const std::string meminfo = root + "/proc/meminfo";
  const int64_t of_system = number_in(meminfo, "MemAvailable:");
  int64_t least = std::numeric_limits<int64_t>::max();
  for (const int64_t bytes :
       {of_system == kUnknown ? kUnknown : of_system * 1024, left_to_commit(root, meminfo), left_by_groups(root)}) {
    if (bytes != kUnknown) least = std::min(least, bytes);
  }
  return least == std::numeric_limits<int64_t>::max() ? kUnknown : least;
}

}  // namespace bytecheckpoint::staging
