// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <mutex>
#include <optional>
#include <set>
#include <string>
#include <vector>

#include "csrc/engine/names.h"
#include "csrc/io/journal.h"
#include "tests/cpp/simulated_disk.h"
#include "tests/cpp/temp_dir.h"

namespace bytecheckpoint::test {

/// A save whose values follow from its number.
struct NumberedSave {
  uint8_t number = 0;  // > 0
  engine::Scope scope{};
  bool overwrite = true;
  bool sync = true;
};

/// The number of the save that `directory` holds, or 0 for none. Every value is read and compared.
struct Loaded {
  int number = 0;
  std::string fault;  // why it is neither; empty if all is well
};
Loaded load_numbered(const std::string& directory, engine::Scope scope, uint32_t num_ranks);

/// Saves one after the other into one directory, and keeps a journal of their changes.
class JournaledSaves {
 public:
  /// \param directory  Directory of the checkpoint, relative to the root of the disk.
  /// \param num_ranks  Ranks in a save with collectives. Each writes a file.
  JournaledSaves(std::string directory, uint32_t num_ranks) : directory_(std::move(directory)), num_ranks_(num_ranks) {}

  void save(const NumberedSave& wish);
  /// A save that is aborted when all data is written, so its files are removed.
  void abort_save(const NumberedSave& wish);
  /// A save that must be refused.
  void refused_save(const NumberedSave& wish);
  /// Kills the process after its first `num_changes` changes. The system stays up and keeps what it holds in memory.
  void kill(size_t num_changes);
  /// Loses power. \param left  What the disk holds then. \param number  The save that it loads as.
  void lose_power(const DiskTree& left, int number);

  const std::vector<io::FileSystemChange>& journal() const { return journal_; }
  /// For a lying disk, in tests of whether the survey notices it.
  std::vector<io::FileSystemChange>* journal_to_change() { return &journal_; }
  /// Makes the disk ignore this change.
  void ignore(size_t change) { ignored_.insert(change); }

  /// The disk after 0, 1, ... changes.
  std::vector<SimulatedDisk> disks() const;
  /// The saves that a load may find if the power fails after `num_changes`: the last save that had returned, or a later
  /// one that had been renamed into place.
  std::set<int> allowed(size_t num_changes, engine::Scope scope) const;

  const std::string& directory() const { return directory_; }
  uint32_t num_ranks() const { return num_ranks_; }

 private:
  struct Span {
    NumberedSave wish;
    size_t begun;                    // changes before the save
    std::optional<size_t> returned;  // changes until the save reported its commit
  };
  /// Changes until a load may find the save.
  std::optional<size_t> renamed(const Span& span) const;
  template <class Run>
  void record(const NumberedSave& wish, bool commits, Run&& run);

  const std::string directory_;
  const uint32_t num_ranks_;
  const TempDir root_{memory_root()};
  DiskTree base_;
  int base_number_ = 0;
  std::mutex mutex_;
  std::vector<io::FileSystemChange> journal_;
  std::set<size_t> ignored_;
  std::vector<Span> spans_;
};

/// Saves into `directory` without a journal. \returns the names of the data files.
std::vector<std::string> save_numbered(const std::string& directory, const NumberedSave& wish, uint32_t num_ranks);

}  // namespace bytecheckpoint::test
