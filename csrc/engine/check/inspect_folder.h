// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "csrc/base/status.h"
#include "csrc/engine/open/check_files.h"

namespace bytecheckpoint::engine {

/// What a directory is, as `inspect_folder` sees it.
enum class FolderState {
  kComplete,    // the commit mark opens, all files have their size and trailer, all tensors all elements
  kSaving,      // no checkpoint yet, but the locked tmp of a save
  kHalf,        // no checkpoint and no live save is seen: a dead save or half a removal left this
  kCorrupt,     // a commit mark is there, but the mark or a data file is not as it was written
  kIncomplete,  // files are as they were written, but a tensor has a gap or overlap, not on purpose
  kUnknown,     // nothing of a checkpoint is there, or we cannot look at what is there
};

/// What a directory holds, as far as that is known without reading data.
struct FolderInspection {
  FolderState state = FolderState::kUnknown;
  std::string reason;                 // why it is not complete; empty if it is complete
  bool is_being_saved = false;        // the tmp of a save is locked; a complete checkpoint may be there, too
  bool is_foreign = false;            // written by another writer: there are no checksums
  std::vector<std::string> save_ids;  // of the commit marks that open; empty for another writer's
  std::vector<uint32_t> parts;        // ranks that committed on their own, sorted
  int64_t num_files = 0;              // data files that the commit marks name, and their bytes
  int64_t num_bytes = 0;

  // All names in the directory.
  std::vector<std::string> marks;
  std::vector<std::string> tmps;        // of our saves
  std::vector<std::string> data_files;  // ours or stock DCP's, and stock DCP's tmps, which have no locks
  std::vector<std::string> others;
};

/// Looks at `directory`. Changes nothing and takes no lock. Reads the commit marks and the trailers of all files, no
/// data.
///
/// If ranks saved on their own, the checkpoint is complete if the ranks are 0 to some n without a gap, because their
/// number is written nowhere. A removal therefore takes the part of rank 0 first. Their tensors are judged by the boxes
/// of all parts together.
///
/// If a commit replaces the checkpoint meanwhile, this looks again, up to 4 times in all. What was found about the
/// tensors of a save is remembered, so that looking again at large metadata is cheap.
///
/// \param own_tmp  Name of a tmp that the caller holds; it is ignored.
/// \param ranks    Those whose files are looked for; the others are on disks of other machines.
/// \returns kStorage if the directory cannot be listed. Every other fault is a `FolderState` with a `reason`.
base::Result<FolderInspection> inspect_folder(const std::string& directory, const std::string& own_tmp = {},
                                              const RanksHere& ranks = {});

}  // namespace bytecheckpoint::engine
