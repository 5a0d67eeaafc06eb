// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "csrc/base/status.h"
#include "csrc/engine/file_check.h"
#include "csrc/format/manifest.h"

namespace bytecheckpoint::engine {

/// What was found in the files of another writer's checkpoint.
struct ForeignCheck {
  int64_t num_records = 0;
  int64_t bytes_checked = 0;    // that were compared with a checksum
  int64_t bytes_unchecked = 0;  // of records, for which there is none
  std::vector<Problem> problems;
};

/// Reads the records of a checkpoint that another writer made, as far as they have checksums: what `torch.save` writes
/// is a zip archive, which has the CRC of each entry. Headers and directories of archives, archives that were written
/// without CRCs, compressed entries, and records that are no archives have none. A record that several chunks name is
/// read once.
///
/// Several threads read and sum, a record at a time; the calling one among them.
///
/// \param manifest  Foreign.
/// \param progress  Called by the calling thread with the bytes done and to do; false ends with kCancelled.
/// \returns what is no damage: kStorage but for files that are missing, kCancelled.
base::Result<ForeignCheck> check_foreign_records(const std::string& directory, const format::Manifest& manifest,
                                                 int num_threads,
                                                 const std::function<bool(int64_t, int64_t)>& progress);

}  // namespace bytecheckpoint::engine
