// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>

namespace bytecheckpoint::base {

/// Places where a test build can be killed: BCP_FAILPOINT=name in the environment (name:3 for the third time) raises
/// SIGKILL there. Other builds contain nothing of it.
enum class Failpoint : uint8_t {
  kBeginDirectory,    // directories exist
  kBeginTmpCreated,   // our tmp exists, not locked
  kBeginLocked,       // and is locked
  kBeginDone,         // swept, reserved
  kWriteFileCreated,  // a data file exists, empty
  kWriteData,         // a slot was written
  kWriteDataDone,     // all bytes were written, not synced
  kWriteFilesSynced,
  kWriteDirectorySynced,
  kCommitChecked,          // coordinator has seen all files
  kCommitMetadataWritten,  // into the tmp
  kCommitMetadataSynced,
  kCommitRenamed,
  kCommitDirectorySynced,
  kSweepListed,
  kSweepTmpRemoved,
  kSweepDirectorySynced,
  kSweepFileRemoved,
  kCommitDone,
};

inline constexpr const char* kFailpointNames[] = {
    "begin_directory",   "begin_tmp_created",       "begin_locked",
    "begin_done",        "write_file_created",      "write_data",
    "write_data_done",   "write_files_synced",      "write_directory_synced",
    "commit_checked",    "commit_metadata_written", "commit_metadata_synced",
    "commit_renamed",    "commit_directory_synced", "sweep_listed",
    "sweep_tmp_removed", "sweep_directory_synced",  "sweep_file_removed",
    "commit_done",
};

#if defined(BCP_FAILPOINTS)
void hit_failpoint(Failpoint point);
#define BCP_FAILPOINT(point) ::bytecheckpoint::base::hit_failpoint(::bytecheckpoint::base::Failpoint::point)
#else
#define BCP_FAILPOINT(point) static_cast<void>(0)
#endif

}  // namespace bytecheckpoint::base
