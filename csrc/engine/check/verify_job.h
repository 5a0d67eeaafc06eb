// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <functional>
#include <string>
#include <vector>

#include "csrc/base/status.h"
#include "csrc/engine/check/file_check.h"
#include "csrc/staging/slot_ring.h"

namespace bytecheckpoint::engine {

/// What to verify, and how.
struct VerifyOptions {
  std::string directory;
  bool direct_io = true;
  int num_threads = 2;  // threads that read, and as many that compute CRCs
  int64_t ring_bytes = staging::kDefaultRingBytes;
};

/// What a verification has found.
struct VerifyReport {
  std::vector<std::string> save_ids;  // one; or one for each rank, if ranks saved on their own
  int64_t num_files = 0;
  int64_t num_records = 0;
  int64_t bytes_checked = 0;
  int64_t bytes_unchecked = 0;            // of another writer's records that have no checksum
  std::vector<Problem> problems;          // at most kMaxProblems
  std::vector<std::string> unreferenced;  // data files that no commit mark names; see engine/check/unreferenced.h
  std::vector<std::string> notes;         // why some of these may belong to a save under way
};

/// Verifies the checkpoint in `options.directory`: compares every byte with its checksum, the manifest with the pickle
/// in the metadata, every tensor with the chunks that must tile it, and every tensor record with the archive that stock
/// readers expect. Goes on after a problem, so that one run reports all of them. Opens nothing for writing and takes no
/// lock.
///
/// Some threads read ahead into slots; others compute CRCs, the calling one among them. The segments of all files form
/// one sequence, so one large file is verified as fast as many small ones.
///
/// In another writer's checkpoint the CRCs in its records are compared, as far as there are any: see `foreign_check.h`.
///
/// \param progress  Called between segments, by the calling thread, with the bytes done and the bytes to do; false ends
/// the run with kCancelled.
/// \returns the report; damage is a `Problem` in it. kNotFound without a checkpoint. kUnsupported for another writer's
/// metadata that we do not read. kChanged if a newer commit replaced the checkpoint meanwhile. kStorage. kCancelled.
base::Result<VerifyReport> verify_checkpoint(const VerifyOptions& options,
                                             const std::function<bool(int64_t, int64_t)>& progress);

}  // namespace bytecheckpoint::engine
