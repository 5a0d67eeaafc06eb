// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <optional>
#include <string>
#include <string_view>

#include "csrc/base/status.h"
#include "csrc/engine/open/model_files.h"
#include "csrc/format/manifest/manifest.h"

namespace bytecheckpoint::engine {

/// What the name of a file of a rank says; `kind` is a view into it.
struct RankFile {
  std::string_view kind;
  int world_size = 0;  // 0 if it does not say
  int rank = 0;        // -1 for `*`
};

/// \returns nothing for another name.
std::optional<RankFile> parse_rank_file(std::string_view name);

/// Finds the files that the ranks of a job have written with torch.save, one each: `KIND_world_size_W_rank_R.pt`, as
/// verl does, or `KIND_R.pt`, as torch_checkpointing does.
///
///     path                                what is found
///     ----                                -------------
///     a folder                            the files of kind `model`, if they say how many there are
///     a folder with metadata.pkl          those of all kinds, each with its kind as root; see checkpointing_step.h
///     FOLDER/KIND_world_size_W_rank_*.pt  those of that kind: `optim`, `extra_state`
///     FOLDER/KIND_*.pt                    those of that kind, up to the highest rank that is there
///
/// \returns the files in the order of ranks. kNotFound if there are none. kCorrupt, naming one, if some are missing.
/// kUnsupported if there are those of several numbers of ranks. kStorage.
base::Result<ModelFiles> find_rank_files(const std::string& path);

/// Makes one tensor of the parts that the ranks had of it. Of other values that several of them have, it keeps that of
/// the lowest rank, and the note of the manifest says if they differ, as far as the checksums in the files show it. A
/// part that ranks have with different elements, and a tensor of which a rank's part cannot be read, are kRefused
/// records.
/// \param manifest  Its items are of the files in the order of `files`, each with a chunk.
/// \returns kCorrupt if ranks have tensors of several shapes or dtypes under one name, or parts that overlap.
base::Status join_ranks(const ModelFiles& files, format::Manifest* manifest);

}  // namespace bytecheckpoint::engine
