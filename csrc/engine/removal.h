// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <functional>
#include <memory>
#include <string>

#include "csrc/base/status.h"
#include "csrc/engine/lock_file.h"
#include "csrc/io/open_directory.h"
#include "csrc/io/remove_entry.h"

namespace bytecheckpoint::engine {

/// The right to remove what a checkpoint directory holds: the same right that a save takes, so that no save begins
/// there meanwhile, and none is removed that lives. Not thread-safe.
///
/// All of it happens in the directory that was open when it began, whatever its path leads to meanwhile.
///
///     begin -> look at what is there -> remove_marks -> (the caller removes everything else) -> finish
///
/// The commit marks go first, and that is on disk before anything else goes: what is half removed does not load, nor
/// does power loss bring back a mark whose files are gone. From then on the tmp, free once its process has ended, says
/// of the directory that nobody will finish what is there: a later removal does. Before, the destructor removes it.
class Removal {
 public:
  /// \returns kBusy if a save, or another removal, lives there; kStorage. Then nothing of ours is left.
  static base::Result<std::unique_ptr<Removal>> begin(std::shared_ptr<const io::OpenDirectory> directory);
  ~Removal();

  /// Name of our tmp; empty on a disk too full for one, where no save can begin either.
  const std::string& tmp() const { return tmp_name_; }

  /// Removes `__{rank}.metadata`, the lowest rank first, then `.metadata`, and syncs the directory.
  /// \returns their bytes; kSuperseded if a save with `take_over` took the right; kStorage: nothing else may then be
  /// removed.
  base::Result<int64_t> remove_marks();

  /// kSuperseded if a save with `take_over` took the right: what is there from now on is its.
  base::Status check_right();

  /// Removes the tmp: everything else is gone, or is to stay.
  base::Status finish();

 private:
  Removal(std::shared_ptr<const io::OpenDirectory> directory, std::string tmp_name)
      : directory_(std::move(directory)), tmp_name_(std::move(tmp_name)) {}

  const std::shared_ptr<const io::OpenDirectory> directory_;
  std::string tmp_name_;
  LockFile tmp_;
  bool is_begun_ = false;  // a mark is gone, or there was none: the tmp has to say so
};

/// Removes one entry of a directory that is to go, but no directory that holds a checkpoint, wherever below it.
///
/// \param right       Checked before each step; null if the caller holds none there.
/// \param may_go_on   As of `io::RemovalRules`.
/// \returns kSuperseded, or what `may_go_on` failed with.
base::Result<io::Removed> remove_entry(const io::OpenDirectory& in, const std::string& name, Removal* right,
                                       const std::function<base::Status()>& may_go_on, bool dry_run);

}  // namespace bytecheckpoint::engine
