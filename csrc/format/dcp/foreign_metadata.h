// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <string_view>

#include "csrc/base/status.h"
#include "csrc/format/manifest/manifest.h"

namespace bytecheckpoint::format {

/// What the messages begin with that are about metadata of ByteCheckpoint.
inline constexpr std::string_view kOfByteCheckpoint = "metadata of ByteCheckpoint 0.0.x";

/// Makes a manifest from the `.metadata` of another writer's checkpoint, which is DCP's Metadata as a pickle, or that
/// of ByteCheckpoint 0.0.2 and 0.0.3.
///
/// Interprets the opcodes only; nothing is imported or called. Shapes, boxes, ranges and file names are checked as
/// strictly as `decode_manifest` checks ours, and file names cannot lead out of the directory. Facts that only the
/// files can tell (their sizes, the content of a record) stay unknown.
///
/// Unknown attributes are ignored, and missing ones count as None, because DCP's classes have changed in this way over
/// time. A chunk whose place the storage data do not say gets a record of kind kAbsent.
///
/// \param pickle  The whole file; it must end with the STOP of the pickle.
/// \returns kUnsupported for opcodes and globals that DCP does not write, layouts other than strided, records that went
/// through stream extensions, and planner data of other than builtin types. kCorrupt for what no DCP ever wrote.
/// O(n log n). Takes at most 16 times the size of the pickle and 64 KiB of memory, whatever it contains.
base::Result<Manifest> read_foreign_metadata(std::string_view pickle);

}  // namespace bytecheckpoint::format
