// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <vector>

#include "csrc/base/status.h"
#include "csrc/engine/coverage.h"
#include "csrc/format/manifest/manifest.h"
#include "csrc/format/manifest/write_result.h"

namespace bytecheckpoint::engine {

/// Joins the plan with what the ranks wrote: finds the record of every planned chunk by name and box, and checks that
/// the chunks of every tensor tile it.
///
/// \param manifest  Items as planned, in any order, their chunks without records; everything else as it is to be
/// stored.
/// \param results   Of all ranks. If two ranks wrote the same chunk, the record of the last rank is used, as in DCP.
/// \param gaps      What to do about a tensor whose chunks leave a gap, unless the plan marks it as partial.
/// \returns the manifest with items sorted, and records and files filled in. kInvalidArgument naming the first chunk
/// that no rank wrote, or that was written with another shape or kind, or the first tensor whose chunks overlap or
/// leave a gap. Pure; O(n log n) in chunks and records.
base::Result<format::Manifest> assemble_manifest(format::Manifest manifest,
                                                 const std::vector<format::WriteResult>& results,
                                                 Gaps gaps = Gaps::kRefuse);

}  // namespace bytecheckpoint::engine
