// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <functional>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "csrc/base/status.h"
#include "csrc/engine/commit/lock_file.h"
#include "csrc/io/open_directory.h"
#include "csrc/io/remove_entry.h"

namespace bytecheckpoint::engine {

/// What the tmp of a removal has in it from the moment on in which marks may be gone.
inline constexpr std::string_view kRemovalNote = "removal\n";

/// The right to remove a checkpoint: the same right that a save takes (`commit.h`). So no save can begin there
/// meanwhile, and the checkpoint of a live save is never removed. Not thread-safe.
///
///     begin -> look at what is there -> remove_marks -> (the caller removes everything else) -> finish
///
/// Everything happens in the directory that was open at `begin`, whatever its path leads to later.
///
/// The commit marks go first, and their removal is synced before anything else goes. A checkpoint that is half removed
/// thus does not load, and power loss does not bring back a mark whose files are gone. Once a mark is gone, the tmp
/// stays until `finish`: if the process ends before, the tmp with its free lock says that the rest can be removed,
/// which a later removal does, and its content that somebody had decided to. If no mark was removed yet, the destructor
/// removes the tmp.
class Removal {
 public:
  /// Creates and locks a tmp.
  /// \returns kBusy if a save or another removal lives there. kStorage. After a failure nothing of ours is left.
  static base::Result<std::unique_ptr<Removal>> begin(const std::shared_ptr<const io::OpenDirectory>& directory);
  ~Removal();

  /// Name of our tmp. It is empty if the disk is too full to create one; no save can begin there then.
  const std::string& tmp() const { return tmp_name_; }

  /// Removes every `__{rank}.metadata`, the lowest rank first, then `.metadata`, and syncs the directory.
  /// \returns the bytes of the removed marks. kSuperseded if a save with `take_over` took the right. kStorage. After a
  /// failure nothing else may be removed.
  base::Result<int64_t> remove_marks();

  /// \returns kSuperseded if a save with `take_over` took the right: what is there from now on belongs to that save.
  base::Status check_right();

  /// Removes the tmp. Call it when everything else is gone, or is to stay.
  base::Status finish();

 private:
  Removal(std::shared_ptr<const io::OpenDirectory> directory, std::string tmp_name)
      : directory_(std::move(directory)), tmp_name_(std::move(tmp_name)) {}

  base::Status write_note();

  const std::shared_ptr<const io::OpenDirectory> directory_;
  std::string tmp_name_;
  LockFile tmp_;
  bool is_begun_ = false;  // marks may be gone: from now on only `finish` removes the tmp
};

/// How an entry is removed.
struct RemovalOptions {
  /// Globs: a directory with a file of such a name holds a checkpoint of its own, besides those of DCP.
  std::vector<std::string> stays;
  /// Only look, and say what would be removed.
  bool dry_run = false;
};

/// Removes one entry of a directory, with all that is below it. A directory that holds a checkpoint of its own, at any
/// depth, is left whole.
///
/// \param right  Checked before each step; null if the caller holds none there.
/// \param may_go_on  See `io::RemovalRules`.
/// \returns kSuperseded if the right is gone, or the error of `may_go_on`.
base::Result<io::RemovalOutcome> remove_entry(const io::OpenDirectory& in, const std::string& name, Removal* right,
                                              const std::function<base::Status()>& may_go_on,
                                              const RemovalOptions& options);

}  // namespace bytecheckpoint::engine
