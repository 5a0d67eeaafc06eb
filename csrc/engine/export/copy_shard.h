// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <unordered_set>
#include <vector>

#include "csrc/base/status.h"
#include "csrc/engine/export/element_reader.h"
#include "csrc/engine/save/save_job.h"
#include "csrc/format/manifest/write_result.h"

namespace bytecheckpoint::engine {

/// Rows [first, first + rows) of a tensor along its first dim, which become one chunk. A tensor without dims is one
/// row.
struct RowsToCopy {
  TensorToRead tensor;
  int64_t first = 0;
  int64_t rows = 0;
};

/// What goes into the data files of one rank, in this order.
struct ShardToCopy {
  std::vector<RowsToCopy> tensors;
  std::vector<std::string> as_is;  // objects, and tensors that are not plain: their records are copied
};

/// How it is copied.
struct CopyOptions {
  LoadOptions reading;
  SaveOptions saving;
  ConvertElements convert;                   // needed where a dtype differs from the stored one
  std::unordered_set<std::string> computed;  // names of tensors whose elements all go through `convert`
  StoredChecksums* checksums = nullptr;      // which the runs follow, if any
  /// Called in the calling thread with the bytes of elements and records that were copied so far; false ends it with
  /// kCancelled.
  std::function<bool(int64_t)> progress;
};

/// Writes the data files of one rank from a checkpoint, which may be of another writer, and sharded in any way. Memory
/// is that of two rings.
///
/// \param checkpoint  Of `options.reading.directory`.
/// \param view        If `checkpoint` is that of a view; else null.
/// \returns what `ElementReader` and `SaveJob` return. After a failure files may be there.
base::Result<format::WriteResult> copy_shard(const CopyOptions& options,
                                             std::shared_ptr<const format::Manifest> checkpoint,
                                             const CheckpointView* view, const ShardToCopy& shard);

/// Plans the checkpoint that `shards` make together: the items of `checkpoint` that are in them, in that order, their
/// chunks without records. Pure.
/// \returns kInvalidArgument for an item that is not there.
base::Result<format::Manifest> plan_copy(const format::Manifest& checkpoint, const std::vector<ShardToCopy>& shards);

}  // namespace bytecheckpoint::engine
