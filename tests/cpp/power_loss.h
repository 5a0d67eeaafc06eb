// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <random>
#include <set>
#include <string>
#include <unordered_map>
#include <vector>

#include "tests/cpp/journaled_saves.h"
#include "tests/cpp/shown_tree.h"
#include "tests/cpp/simulated_disk.h"
#include "tests/cpp/temp_dir.h"

namespace bytecheckpoint::test {

/// What a survey has found.
struct PowerLossTally {
  int64_t states = 0;  // different trees, each loaded by our own code
  // those first seen where two saves may be there: one is renamed, but not known to be on disk
  int64_t undecided = 0;
  int64_t verified = 0;           // those verified by reading every byte
  int64_t saved_again = 0;        // those into which another save was made
  std::map<int, int64_t> loaded;  // by the number of the save, 0 for none
  int64_t violations = 0;
  std::string first_violation;
};

/// Removes power after each change of some saves, in as many ways as a disk may fail, and checks what is left: one of
/// the saves that may be there, whole, or nothing if nothing may be there.
///
/// Trees are real directories, in memory if the machine has such a file system.
class PowerLossSurvey {
 public:
  /// \param watched  The scope whose checkpoint is loaded.
  PowerLossSurvey(const JournaledSaves& saves, engine::Scope watched, uint64_t seed);

  /// Runs until `num_states` different trees have been seen, or random trees are no longer new.
  /// \param until_violated  Also ends at the first violation.
  const PowerLossTally& run(int64_t num_states, bool until_violated);

 private:
  /// \returns true if the tree is new.
  bool look_at(size_t point, const DiskTree& tree);
  int examine(const DiskTree& tree, std::string* fault);
  std::string save_again();
  void violate(size_t point, const DiskTree& tree, const std::string& what);

  const JournaledSaves& saves_;
  const engine::Scope watched_;
  std::mt19937_64 random_;
  const std::vector<SimulatedDisk> disks_;  // after 0, 1, ... changes
  std::vector<std::set<int>> allowed_;      // after 0, 1, ... changes
  const TempDir dir_;
  const std::string directory_;  // of the checkpoint, in dir_
  ShownTree shown_;
  std::unordered_map<uint64_t, int> seen_;  // hash of a tree to the save it loads as
  PowerLossTally tally_;
};

}  // namespace bytecheckpoint::test
