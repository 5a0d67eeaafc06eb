// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <atomic>
#include <string>
#include <vector>

#include "csrc/engine/save/last_save.h"
#include "csrc/engine/save/unchanged.h"
#include "csrc/format/manifest/write_result.h"
#include "csrc/io/io_deadline.h"

namespace bytecheckpoint::engine {

/// Where files are linked, and how.
struct LinkTarget {
  std::string directory;
  bool sync = true;                 // fsync what is linked: the save before may not have
  double visibility_timeout_s = 0;  // how long to wait for the directory to be seen, where that may be late
};

/// The files of the last save that a save has because their tensors are unchanged: hard links, under the same names; in
/// an object store, copies that the store makes.
///
/// A file that was linked is as its rank left it: its size, its trailer and its ids are compared. One that is not, and
/// what the file system refuses to link, is written instead. Any thread may call `bytes_in_use`; one at a time all
/// else.
class LinkedFiles {
 public:
  /// Links the files that `rule` chooses.
  /// \param tensors  Of the save.
  /// \param records  Of each tensor what the last save has, unchanged; null for those that are linked, afterwards.
  void link(const LinkTarget& target, const LastSave& last, LinkRule rule, const std::vector<TensorToWrite>& tensors,
            std::vector<const SavedRecord*>* records, io::IoDeadline* deadline);

  /// Names of the links, also of those that turned out to be of no use.
  const std::vector<std::string>& names() const { return names_; }
  int64_t num_bytes() const { return num_bytes_; }
  /// Bytes of the tensors in them that this save has.
  int64_t bytes_in_use() const { return bytes_in_use_; }
  bool is_empty() const { return saved_.files.empty(); }
  /// Why a file was not linked; ok if none was refused.
  const base::Status& refused() const { return refused_; }

  /// Adds files and records behind those that were written.
  void add_to(format::WriteResult* result, LastSave* saved) const;

 private:
  bool is_linked(const LinkTarget& target, const std::string& from, const format::FileEntry& file,
                 io::IoDeadline* deadline);

  LastSave saved_;
  std::vector<std::string> names_;
  int64_t num_bytes_ = 0;
  std::atomic<int64_t> bytes_in_use_{0};
  base::Status refused_;
};

}  // namespace bytecheckpoint::engine
