// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <vector>

#include "csrc/base/status.h"
#include "csrc/engine/coverage.h"
#include "csrc/format/manifest.h"
#include "csrc/format/write_result.h"

namespace bytecheckpoint::engine {

/// Joins what was planned with what was written: every chunk of every item finds its record by name and box, and the
/// chunks of every tensor tile it.
///
/// \param manifest  Items as planned, in any order, chunks without records; everything else as it shall be stored.
///                  Returned with items sorted, records and files filled in.
/// \param results   Of all ranks. Where two ranks wrote one chunk, the last rank's record is taken, as in DCP.
/// \param gaps      What a tensor is whose chunks do not cover it, unless the plan has marked it as partial.
/// \returns kInvalidArgument naming the first chunk that nobody wrote, or wrote with another shape or kind, or the
/// first tensor whose chunks overlap or leave a gap.
base::Result<format::Manifest> assemble_manifest(format::Manifest manifest,
                                                 const std::vector<format::WriteResult>& results,
                                                 Gaps gaps = Gaps::kRefuse);

}  // namespace bytecheckpoint::engine
