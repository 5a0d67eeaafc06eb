// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "csrc/base/status.h"
#include "csrc/format/dcp/dcp_pickle.h"
#include "csrc/format/manifest/manifest.h"

namespace bytecheckpoint::format {

/// Sets the place of every chunk of `manifest` from DCP's storage data: fills in the records and the list of files.
///
/// DCP's storage data are a dict from MetadataIndex to _StorageInfo. An entry with an offset belongs to the chunk of
/// its name that begins there. An entry without an offset belongs to the chunk of its index, or to the only chunk. Of
/// equal entries the last counts, as in a dict. Entries for names that the manifest does not have are skipped.
///
/// \param storage_data  That dict, or None, which leaves every chunk without a place.
/// \param manifest  Its items are sorted; their chunks have boxes, and records of kind kAbsent.
/// \returns kUnsupported and kCorrupt as `read_foreign_metadata` does.
base::Status read_storage_data(const PickleValue& storage_data, DcpPickle* pickle, Manifest* manifest);

/// Sets where the elements are in the records of tensors, whose places `read_storage_data` has set, from the headers
/// that ByteCheckpoint 0.0.x keeps: a dict from MetadataIndex to the bytes of a pickle, or None for an object. The
/// pickle is that of a tensor whose storage is the whole record.
///
/// \returns kUnsupported and kCorrupt as `read_foreign_metadata` does; kCorrupt for a tensor that reaches out of its
/// record, or has another dtype or shape than its chunk.
base::Status read_tensor_headers(const PickleValue& headers, DcpPickle* pickle, Manifest* manifest);

}  // namespace bytecheckpoint::format
