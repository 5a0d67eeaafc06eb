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

/// What `directory` holds: the number of the save, 0 if there is none. Every value is read and compared.
struct Loaded {
  int number = 0;
  std::string fault;  // of what is neither; empty if all is well
};
Loaded load_numbered(const std::string& directory, engine::Scope scope, uint32_t num_ranks);

/// Saves of one directory, one after the other, with a journal of what they changed.
class JournaledSaves {
 public:
  /// \param directory  Of the checkpoint, below the root of the disk.
  /// \param num_ranks  Each writes a file in saves with collectives.
  JournaledSaves(std::string directory, uint32_t num_ranks) : directory_(std::move(directory)), num_ranks_(num_ranks) {}

  void save(const NumberedSave& wish);
  /// A save that ends when all is written: its files are removed.
  void abort_save(const NumberedSave& wish);
  /// A save that is refused.
  void refused_save(const NumberedSave& wish);
  /// The process is killed after its first `num_changes` changes. The system lives, and what it holds in memory.
  void kill(size_t num_changes);
  /// The power fails. \param left  What the disk holds then. \param number  What that loads as.
  void lose_power(const DiskTree& left, int number);

  const std::vector<io::FileSystemChange>& journal() const { return journal_; }
  /// For a disk that lies, and tests that look whether that is seen.
  std::vector<io::FileSystemChange>* journal_to_change() { return &journal_; }
  /// A disk that takes no notice of this change.
  void ignore(size_t change) { ignored_.insert(change); }

  /// The disk after 0, 1, ... changes.
  std::vector<SimulatedDisk> disks() const;
  /// What may be loaded if the power fails after `num_changes`: the last save that had returned, or a later one, if it
  /// had been renamed into place.
  std::set<int> allowed(size_t num_changes, engine::Scope scope) const;

  const std::string& directory() const { return directory_; }
  uint32_t num_ranks() const { return num_ranks_; }

 private:
  struct Span {
    NumberedSave wish;
    size_t begun;                    // changes before it
    std::optional<size_t> returned;  // changes until it said that it was committed
  };
  /// Changes until it may be loaded.
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

/// Saves in the usual way into `directory`, without a journal. \returns the names of its data files.
std::vector<std::string> save_numbered(const std::string& directory, const NumberedSave& wish, uint32_t num_ranks);

}  // namespace bytecheckpoint::test
