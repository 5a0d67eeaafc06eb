// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <functional>
#include <string>
#include <vector>

#include "csrc/base/status.h"
#include "csrc/engine/names.h"
#include "csrc/staging/slot_ring.h"

namespace bytecheckpoint::engine {

struct VerifyOptions {
  std::string directory;
  bool direct_io = true;
  int64_t ring_bytes = staging::kDefaultRingBytes;
};

/// One thing that is not as it was written.
struct Problem {
  std::string file;     // name in the directory
  std::string section;  // "metadata", "file", "header", "records", "block table or trailer"
  int64_t offset = 0;   // of the first byte in doubt, and how many; -1: not known
  int64_t bytes = -1;
  std::vector<std::string> fqns;  // of the records with bytes there
  std::string message;
};

struct VerifyReport {
  std::vector<std::string> save_ids;  // one, or one a rank that saved on its own
  int64_t num_files = 0;
  int64_t num_records = 0;
  int64_t bytes_checked = 0;
  std::vector<Problem> problems;  // no more than kMaxProblems
};

inline constexpr size_t kMaxProblems = 1000;

/// Reads every byte of the checkpoint in `options.directory` and compares it with its checksum; compares the two parts
/// of the metadata with each other, and every tensor record with the archive that stock readers expect there. Reads on
/// after a problem, so that one run says all there is to say. Changes nothing.
///
/// \param progress  Called between segments with the bytes done and to do; false ends with kCancelled.
/// \returns kNotFound without a checkpoint; kUnsupported for a foreign one, which has no checksums; kChanged if a
/// newer commit came in between.
base::Result<VerifyReport> verify_checkpoint(const VerifyOptions& options,
                                             const std::function<bool(int64_t, int64_t)>& progress);

}  // namespace bytecheckpoint::engine
