// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <string_view>
#include <vector>

#include "csrc/base/status.h"
#include "csrc/format/manifest.h"
#include "csrc/format/write_result.h"

namespace bytecheckpoint::bindings {

/// What the coordinator of a large save has in its hands, without a save. For benchmarks alone.
struct SyntheticCheckpoint {
  format::Manifest plan;                     // chunks without records
  std::vector<format::WriteResult> results;  // of each rank: one file
};

/// bfloat16 tensors of two dims in shards of equal size, each rank holding `chunks_per_rank`, at the places at which a
/// save of ours would put them.
///
/// \param kind  "fsdp": every tensor is sharded along dim 0 over all ranks. "3d": groups of up to 80 ranks hold tensors
///              of their own, in a grid of 8 columns.
/// \returns kInvalidArgument for another kind, or numbers that do not fit it.
base::Result<SyntheticCheckpoint> make_synthetic_checkpoint(std::string_view kind, int64_t num_ranks,
                                                            int64_t chunks_per_rank);

}  // namespace bytecheckpoint::bindings
