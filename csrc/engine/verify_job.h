// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <functional>
#include <string>
#include <vector>

#include "csrc/base/status.h"
#include "csrc/engine/file_check.h"
#include "csrc/staging/slot_ring.h"

namespace bytecheckpoint::engine {

struct VerifyOptions {
  std::string directory;
  bool direct_io = true;
  int num_threads = 2;  // that read, and as many that sum
  int64_t ring_bytes = staging::kDefaultRingBytes;
};

struct VerifyReport {
  std::vector<std::string> save_ids;  // one, or one a rank that saved on its own
  int64_t num_files = 0;
  int64_t num_records = 0;
  int64_t bytes_checked = 0;
  int64_t bytes_unchecked = 0;            // of another writer's records, that have no checksum
  std::vector<Problem> problems;          // no more than kMaxProblems
  std::vector<std::string> unreferenced;  // data files that no commit mark names; see engine/unreferenced.h
  std::vector<std::string> notes;         // why some may be none
};

/// Reads every byte of the checkpoint in `options.directory` and compares it with its checksum; compares the two parts
/// of the metadata with each other, every tensor with the chunks that shall tile it, and every tensor record with the
/// archive that stock readers expect there. Reads on after a problem, so that one run says all there is to say. Opens
/// nothing for writing and takes no lock.
///
/// Threads read ahead into slots, others sum them, the calling one among them; all segments of all files are one row,
/// so one large file is as quick as many.
///
/// \param progress  Called between segments, by the calling thread, with the bytes done and to do; false ends with
/// kCancelled.
/// Of a checkpoint of another writer the CRCs in its records are compared, as far as there are any; see
/// foreign_check.h.
///
/// \returns kNotFound without a checkpoint; kUnsupported for metadata of another writer that we do not read; kChanged
/// if a newer commit came in between.
base::Result<VerifyReport> verify_checkpoint(const VerifyOptions& options,
                                             const std::function<bool(int64_t, int64_t)>& progress);

}  // namespace bytecheckpoint::engine
