// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "csrc/base/status.h"
#include "csrc/engine/check/file_check.h"
#include "csrc/format/manifest/manifest.h"

namespace bytecheckpoint::engine {

/// What a check of another writer's checkpoint has found.
struct ForeignCheck {
  int64_t num_records = 0;
  int64_t bytes_checked = 0;    // bytes that were compared with a checksum
  int64_t bytes_unchecked = 0;  // bytes of records that have no checksum
  std::vector<Problem> problems;
};

/// Compares the records of another writer's checkpoint with their checksums, as far as they have any. What `torch.save`
/// writes is a zip archive with a CRC of each entry. No checksum is there for headers and directories of archives,
/// archives written without CRCs, compressed entries, and records that are no archives. A record that several chunks
/// name is read once. In files of torch.save all entries are compared, also the storages of values that only torch.load
/// can read: sparse and quantized tensors, DTensors.
///
/// Several threads read and compute CRCs, the calling one among them; each takes one record at a time.
///
/// \param manifest  Of another writer's checkpoint.
/// \param progress  Called by the calling thread with the bytes done and the bytes to do; false ends the check with
/// kCancelled.
/// \returns only errors that are no damage: kStorage, except for missing files, and kCancelled. Damage is a `Problem`.
base::Result<ForeignCheck> check_foreign_records(const std::string& directory, const format::Manifest& manifest,
                                                 int num_threads,
                                                 const std::function<bool(int64_t, int64_t)>& progress);

}  // namespace bytecheckpoint::engine
