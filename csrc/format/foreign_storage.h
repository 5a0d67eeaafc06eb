// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "csrc/base/status.h"
#include "csrc/format/dcp_pickle.h"
#include "csrc/format/manifest.h"

namespace bytecheckpoint::format {

/// Says of every chunk of `manifest` where it lies: fills its records and the files.
///
/// DCP's storage data are a dict from MetadataIndex to _StorageInfo. An entry belongs to the chunk of its name that
/// begins at its offset; one without offset to the chunk of its index, or to the only one. Of equal entries the last
/// counts, as in a dict. Entries for names that the manifest does not have are skipped.
///
/// \param storage_data  That dict, or None: no chunk has a place.
/// \param manifest      Items sorted; their chunks have boxes, their records are kAbsent.
base::Status read_storage_data(const PickleValue& storage_data, DcpPickle* pickle, Manifest* manifest);

}  // namespace bytecheckpoint::format
