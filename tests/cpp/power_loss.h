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

/// What a survey has seen.
struct PowerLossTally {
  int64_t states = 0;       // different trees, each loaded by our own code
  int64_t undecided = 0;    // of them, first seen where two saves may be there: renamed, and not known to be on disk
  int64_t verified = 0;     // of them, by reading every byte
  int64_t saved_again = 0;  // of them, into which another save was made
  std::map<int, int64_t> loaded;  // by the number of the save, 0 for none
  int64_t violations = 0;
  std::string first_violation;
};

/// Takes the power away after each change of some saves, in as many ways as a disk may take it, and looks what is left:
/// one of the saves that may be there, whole, or nothing where nothing may be.
///
/// Trees are real directories, in memory where the machine has such a file system.
class PowerLossSurvey {
 public:
  /// \param watched  Whose checkpoint is loaded.
  PowerLossSurvey(const JournaledSaves& saves, engine::Scope watched, uint64_t seed);

  /// Goes on until `num_states` different trees have been seen, or random ones no longer give new ones.
  /// \param until_violated  Ends at the first violation, too.
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
  std::vector<std::set<int>> allowed_;      // likewise
  const TempDir dir_;
  const std::string directory_;  // of the checkpoint, in it
  ShownTree shown_;
  std::unordered_map<uint64_t, int> seen_;  // by the hash of the tree: what it loads as
  PowerLossTally tally_;
};

}  // namespace bytecheckpoint::test
