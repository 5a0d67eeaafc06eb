// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "csrc/base/status.h"

namespace bytecheckpoint::engine {

enum class FolderState {
  kComplete,    // the commit mark opens, every file is there with its size and trailer, every tensor has all elements
  kSaving,      // no checkpoint yet, and the tmp of a save is locked
  kHalf,        // no checkpoint, and nobody is seen to make one: what a dead save, or half a removal, left
  kCorrupt,     // a commit mark is there, but not what was written: it or one of the files
  kIncomplete,  // all is as it was written, but the chunks of a tensor do not tile it, and nobody has said that it is
                // meant
  kUnknown,     // nothing of a checkpoint is there, or what is there cannot be looked at by us
};

/// What a directory holds, as far as that can be told without reading data.
struct FolderInspection {
  FolderState state = FolderState::kUnknown;
  std::string reason;                 // why it is not complete; empty if it is
  bool is_being_saved = false;        // the tmp of a save is locked; there may be a complete checkpoint all the same
  bool is_foreign = false;            // of another writer: there are no checksums
  std::vector<std::string> save_ids;  // of the commit marks that open; empty of another writer's
  std::vector<uint32_t> parts;        // ranks that committed on their own, sorted
  int64_t num_files = 0;              // data files that the commit marks name, and their bytes
  int64_t num_bytes = 0;

  // All names in the directory.
  std::vector<std::string> marks;
  std::vector<std::string> tmps;        // of our saves
  std::vector<std::string> data_files;  // ours or stock DCP's, and the tmps of stock DCP, which have no locks
  std::vector<std::string> others;
};

/// Looks at `directory`; changes nothing, takes no lock.
///
/// A checkpoint of ranks that saved on their own is complete if the ranks are 0 to some n: how many there were is
/// written nowhere. The part of rank 0 is what a removal takes first. Their tensors are judged by what all parts hold.
///
/// What was found of the tensors of a save is remembered, so that looking again at large metadata stays cheap.
///
/// \param own_tmp  Name of a tmp that the caller holds; as if it were not there.
/// \returns kStorage if the directory cannot be listed.
base::Result<FolderInspection> inspect_folder(const std::string& directory, const std::string& own_tmp = {});

}  // namespace bytecheckpoint::engine
