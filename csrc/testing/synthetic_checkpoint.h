// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <string_view>
#include <vector>

#include "csrc/base/status.h"
#include "csrc/format/manifest/manifest.h"
#include "csrc/format/manifest/write_result.h"

namespace bytecheckpoint::testing {

/// What the coordinator of a large save works on, without the save.
struct SyntheticCheckpoint {
  format::Manifest plan;                     // chunks without records
  std::vector<format::WriteResult> results;  // one for each rank, with one file
};

/// Makes the plan and the results of a save of bfloat16 tensors of two dims, in shards of equal size. Each rank holds
/// `chunks_per_rank`, at the offsets at which a save of ours would write them.
base::Result<SyntheticCheckpoint> make_synthetic_checkpoint(std::string_view kind, int64_t num_ranks,
                                                            int64_t chunks_per_rank);

}  // namespace bytecheckpoint::testing
