// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <string_view>

#include "csrc/base/status.h"
#include "csrc/format/manifest.h"

namespace bytecheckpoint::format {

/// The manifest of a checkpoint that another writer made, from its `.metadata`: DCP's Metadata, pickled.
///
/// Read from the opcodes; nothing is imported or called. What the pickle says is checked as `decode_manifest` checks
/// ours: shapes, boxes, ranges, and file names, which stay inside the directory. What only the files can tell (their
/// sizes, what is in a record) is not known yet.
///
/// Attributes that nobody asks for are let be, missing ones count as None: that is how DCP's classes changed over
/// time. A chunk for which the storage data have no place is kAbsent.
///
/// \param pickle  The whole file; it must end with the pickle's STOP.
/// \returns kUnsupported for opcodes and globals that DCP does not write, layouts other than strided, records that
///   went through stream extensions, planner data of other than builtin types; kCorrupt for what no DCP ever wrote.
/// O(n log n); memory is at most 16 times the pickle and 64 KiB, whatever it holds.
base::Result<Manifest> read_foreign_metadata(std::string_view pickle);

}  // namespace bytecheckpoint::format
