// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <functional>
#include <string>

#include "csrc/base/status.h"
#include "csrc/format/manifest/manifest.h"
#include "csrc/staging/slot_ring.h"

namespace bytecheckpoint::engine {

/// From where to where files are copied, and how.
struct CopyFilesOptions {
  std::string source;  // a directory, or a URL
  std::string target;  // the same; exists, if it is a directory
  bool direct_io = true;
  int num_threads = 2;  // threads that read, and as many that write
  int64_t ring_bytes = staging::kDefaultRingBytes;
  int niceness = 0;         // added to that of the threads that write
  int64_t bytes_per_s = 0;  // limit of the write speed; 0: as fast as the storage takes them
  double io_timeout_s = 0;  // how long one read or write may take; 0: for ever
};

/// Copies the data files of a checkpoint of ours as they are, so that its metadata may stand beside the copies.
///
///     read a segment -> compare its blocks and records with their checksums -> write it -> ... -> sync, next file
///
/// Every byte is compared on its way (`engine/check/file_check.h`); trailer and block table of each copy once more
/// where they were written. The copies are durable when this returns, and nobody reads them before a commit.
///
/// \param progress  Called by the calling thread with the bytes done and the bytes to do; false ends it with
/// kCancelled.
/// \returns the bytes of all files. kCorrupt for damage in the source. kStorage; with EEXIST if a file is there.
/// kUnsupported for a checkpoint of another writer. After a failure files may be there.
base::Result<int64_t> copy_files(const CopyFilesOptions& options, const format::Manifest& manifest,
                                 const std::function<bool(int64_t, int64_t)>& progress);

}  // namespace bytecheckpoint::engine
