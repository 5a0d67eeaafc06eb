// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <string>

#include "csrc/base/status.h"
#include "csrc/engine/open/model_files.h"
#include "csrc/format/manifest/manifest.h"

namespace bytecheckpoint::engine {

/// Finds the files that the ranks of a job have written with torch.save, one each: `KIND_world_size_W_rank_R.pt`, as
/// verl does, or `KIND_R.pt`, as torch_checkpointing does.
///
///     path                                what is found
///     ----                                -------------
///     a folder                            the files of kind `model`
///     FOLDER/KIND_world_size_W_rank_*.pt  those of that kind: `optim`, `extra_state`
///     FOLDER/KIND_*.pt                    those of that kind, up to the highest rank that is there
///
/// \returns the files in the order of ranks. kNotFound if there are none. kCorrupt, naming one, if some are missing.
/// kUnsupported if there are those of several numbers of ranks. kStorage.
base::Result<ModelFiles> find_rank_files(const std::string& path);

/// Makes one tensor of the parts that the ranks had of it. Of other values that all of them have, it keeps that of the
/// lowest rank.
/// \param manifest  Its items are of the files in the order of ranks, each with a chunk.
/// \returns kCorrupt if ranks have tensors of several shapes or dtypes under one name.
base::Status join_ranks(const ModelFiles& files, format::Manifest* manifest);

}  // namespace bytecheckpoint::engine
